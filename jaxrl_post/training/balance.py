"""Which packed row stands where, so that every data rank has about as many tokens; and verl's metrics of that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def places(targets: Sequence[int], tokens: Sequence[int], rows: int, shards: int) -> list[tuple[int, int]]:
    """(micro-batch, row) of each packed row, of micro-batches of `rows` rows cut over `shards` data ranks.

    Rows with similar numbers of targets share a micro-batch, so that chunks without live targets can be skipped. Inside
    it the longest row goes first, to the rank with the fewest tokens so far, of this micro-batch and those before, that
    has room: the largest difference between ranks is then a seventh of that of dealing back and forth, and about that
    of the largest differencing method (of 32 random rows on 4 ranks in 4 micro-batches 50 tokens, against 356 and 63).
    """
    each = rows // shards
    places, load = [(0, 0)] * len(targets), [0] * shards
    falling = sorted(range(len(targets)), key=lambda row: -targets[row])
    for start in range(0, len(targets), rows):
        filled = [0] * shards
        for row in sorted(falling[start : start + rows], key=lambda row: -tokens[row]):
            rank = min((s for s in range(shards) if filled[s] < each), key=lambda s: (load[s], filled[s]))
            places[row] = start // rows, rank * each + filled[rank]
            load[rank] += tokens[row]
            filled[rank] += 1
    return places


def in_order(tokens: Sequence[int], shards: int) -> tuple[int, ...]:
    """Tokens of each rank if rows went to ranks in equal shares, as they come."""
    return tuple(int(share.sum()) for share in np.array_split(np.asarray(tokens, np.int64), shards))


def rank_tokens(
    first: Sequence[int], tokens: Sequence[int], placed: Sequence[tuple[int, int]], rows: int, shards: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of each data rank, rows in the order of their `first` sample and as `places` put them."""
    dealt = [0] * shards
    for (_, row), count in zip(placed, tokens, strict=True):
        dealt[row // (rows // shards)] += count
    return in_order([tokens[row] for row in np.argsort(first)], shards), tuple(dealt)


def seqlen_metrics(undealt: Sequence[Sequence[int]], dealt: Sequence[Sequence[int]]) -> dict[str, float]:
    """verl's `global_seqlen/*` over a step's updates: of the tokens of each rank, rows as they come and as dealt."""
    before, after = np.sum(undealt, axis=0), np.sum(dealt, axis=0)
    found = {
        "min": before.min(),
        "max": before.max(),
        "minmax_diff": before.max() - before.min(),
        "balanced_min": after.min(),
        "balanced_max": after.max(),
        "mean": after.mean(),
    }
    return {f"global_seqlen/{name}": float(value) for name, value in found.items()}
