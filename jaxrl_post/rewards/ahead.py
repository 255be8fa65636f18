"""Grading in worker processes that may begin before all of a step's samples are there.

Legend: N responses.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from jaxrl_post.rewards.call import Graded
from jaxrl_post.rewards.grader import Part, call_of, parts_of
from jaxrl_post.rewards.pool import Pool
from jaxrl_post.types import Response

Key = tuple[int, ...]  # the identities of a part's responses


class Ahead:
    """A grader's score: calls of a pool, some of which were begun before. Call it from any thread."""

    def __init__(self, pool: Pool, per: Part) -> None:
        self._pool, self._per = pool, per
        self._begun: dict[Key, tuple[Sequence[Response], Future[list[Graded]]]] = {}  # which keeps the identities
        self._lock = threading.Lock()

    def begin(self, groups: Sequence[Sequence[Response | None]]) -> None:
        """Of a step's groups of prompts, with None for samples that are not there yet: begin what is whole and new.

        The same objects are to be given to the call that wants the scores, which forgets all that it does not ask for.
        """
        parts = groups if self._per == "group" else [[one] for group in groups for one in group]
        whole = [[one for one in part if one is not None] for part in parts]
        with self._lock:
            self._submit([part for part, all_of_it in zip(whole, parts, strict=True) if len(part) == len(all_of_it)])

    def __call__(self, responses: Sequence[Response]) -> list[Graded]:
        """[N]."""
        parts = parts_of(responses, self._per)
        with self._lock:
            try:
                self._submit(parts)
                return list(itertools.chain(*(self._begun[_key(part)][1].result() for part in parts)))
            except BaseException:
                self._pool.stop()  # nobody waits for what its workers are at
                raise
            finally:
                self._begun.clear()

    @property
    def seconds(self) -> float:
        """As `Pool.seconds`."""
        return self._pool.seconds

    def _submit(self, parts: Sequence[Sequence[Response]]) -> None:
        new = {key: part for part in parts if (key := _key(part)) not in self._begun}
        outcomes = self._pool.submit([call_of(part) for part in new.values()])
        self._begun |= {key: (part, outcome) for (key, part), outcome in zip(new.items(), outcomes, strict=True)}


def _key(part: Sequence[Response]) -> Key:
    return tuple(id(response) for response in part)
