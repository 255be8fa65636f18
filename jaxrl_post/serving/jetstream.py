"""`jetstream.engine.engine_api.Engine` on the host-driven engine (PyPI google-jetstream 0.2.2, archived).

Its package is no dependency: whoever imports this module has installed `jetstream`. JetStream's prefill and insert
carry no options of a request, so all requests share one `Request`; the n-th one inserted draws with id n.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models.decoder import Params
from jaxrl_post.rollout.step_programs import Weights
from jaxrl_post.rollout.step_records import Burst, Prefix, Request
from jaxrl_post.rollout.stepper import StepEngine


class JetStreamEngine(engine_api.Engine):
    """A decode state is a `StepEngine` with its slots, changed in place and handed back."""

    def __init__(
        self, make: Callable[[], StepEngine], mesh: Mesh, params: Params, tokenizer: Tokenizer, request: Request
    ):
        """`make` builds an engine on `mesh`; `params` are in the rollout layout."""
        self._make, self._mesh, self._params = make, mesh, params
        self._engine, self._tokenizer, self._request = make(), tokenizer, request
        self._numbers = itertools.count()

    def load_params(self, *args: Any, **kwargs: Any) -> Weights:
        return self._engine.load(self._params)

    def prefill(
        self,
        *,
        params: Weights,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
    ) -> Prefix:
        """An existing prefix is computed again with what follows it."""
        before = () if existing_prefix is None else existing_prefix.ids
        return self._engine.prefill(params, [*before, *np.asarray(padded_tokens).reshape(-1)[:true_length].tolist()])

    def insert(self, prefix: Prefix, decode_state: StepEngine, slot: int) -> StepEngine:
        """JetStream never says that a slot is free: it inserts over what is there."""
        limit = min(self._request.limit, decode_state.columns - len(prefix.ids))
        decode_state.free(slot)
        decode_state.insert(prefix, slot, dataclasses.replace(self._request, id=next(self._numbers), limit=limit))
        return decode_state

    def generate(self, params: Weights, decode_state: StepEngine) -> tuple[StepEngine, engine_api.ResultTokens]:
        """k tokens for each slot; those after a sequence's end are not valid."""
        bursts = decode_state.generate(params)
        return decode_state, _result(bursts, len(decode_state.slots), decode_state.steps)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> StepEngine:
        return self._make()

    def get_prefix_destination_sharding(self) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec())

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> JetStreamTokenizer:
        return JetStreamTokenizer(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return len(self._engine.slots)

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._engine.columns - 1

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None


def _result(bursts: dict[int, Burst], slots: int, steps: int) -> engine_api.ResultTokens:
    """One row a slot: k tokens, k flags, and the number of valid ones."""
    data = np.zeros((slots, 2 * steps + 1), np.int32)
    for slot, burst in bursts.items():
        n = len(burst.ids)
        data[slot, :n], data[slot, steps : steps + n], data[slot, -1] = burst.ids, 1, n
    ranges = (0, steps), (steps, 2 * steps), (2 * steps, 2 * steps + 1)
    return engine_api.ResultTokens(data, *ranges, samples_per_slot=1)


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """The model's own tokenizer. `encode` pads nothing: prompts of any length are prefilled."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
        ids = self._tokenizer.encode(s, add_bos=bool(kwargs.get("is_bos")) and self._tokenizer.adds_bos)
        return np.array(ids, np.int32), len(ids)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return min(self._tokenizer.stop_ids, default=self._tokenizer.pad_id)

    @property
    def bos_id(self) -> int:
        return self.pad_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._tokenizer.stop_ids)
