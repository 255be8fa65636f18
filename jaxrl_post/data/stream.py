"""An endless, resumable stream over tokenised items."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import grain


class Tokenised(Protocol):
    """Anything with ids that tell it apart; their `repr` identifies it."""

    @property
    def ids(self) -> Any: ...


Item = TypeVar("Item", bound=Tokenised)


class Stream(Generic[Item]):
    """Batches of items without end, in an order that (items, seed, shuffle) fix.

    Every epoch holds each item exactly once, newly shuffled if `shuffle`. Epochs follow each other without a gap, so a
    batch may cross from one into the next, and one larger than the number of items repeats some of them.
    Nothing is read ahead: `state()` counts the items handed out, and `restore` goes on right after them.
    """

    def __init__(self, items: Sequence[Item], batch: int, seed: int, shuffle: bool):
        if not items or batch < 1:
            raise ValueError(f"a prompt stream needs prompts and a batch of at least 1, not {len(items)} and {batch}")
        self._order = _fingerprint(items, seed, shuffle)
        source = grain.MapDataset.source(items).seed(seed)
        endless = (source.shuffle() if shuffle else source).repeat()
        in_process = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._items, self.batch = iter(endless.to_iter_dataset(in_process)), batch

    def next(self, count: int | None = None) -> list[Item]:
        """The next `count` items; a batch for None."""
        return [next(self._items) for _ in range(self.batch if count is None else count)]

    def state(self) -> dict[str, Any]:
        """The position after the batches handed out so far, for JSON."""
        return {"order": self._order, "position": self._items.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a saved position; the batch size may have changed. Raises ValueError if the order would differ."""
        if state["order"] != self._order:
            raise ValueError(
                "the saved data position belongs to other prompts, another seed or another data.shuffle, so prompts "
                "would be repeated or missed: restore those settings, or start anew with another run_dir"
            )
        self._items.set_state(state["position"])


def _fingerprint(items: Sequence[Tokenised], seed: int, shuffle: bool) -> str:
    digest = hashlib.sha256(repr((seed, shuffle)).encode())
    for item in items:
        digest.update(repr(item.ids).encode())
    return digest.hexdigest()[:16]
