"""Mapping the memory of the next growth before it is needed, a little in each step.

A boundary is crossed by all of a cache's buffers at once: 48 or more granules in one step, each a few driver calls.
Here a step's share is what is left over the tokens that are left, so the boundary itself finds everything mapped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from onnx_kv.errors import NativeError
from onnx_kv.geometry import ByteRange
from onnx_kv.runtime.backing import Backing
from onnx_kv.runtime.growth import Growth, Piece


class CommitAhead:
    """Commits what `growth` will need next, from half of `tokens` before it is needed."""

    def __init__(self, growth: Growth, backing: Backing, tokens: int) -> None:
        self._growth = growth
        self._backing = backing
        self._distance = tokens // 2
        # By part of the cache: the boundary that is prepared for, and what is left to commit for it.
        self._prepared: dict[int, tuple[int, deque[Piece]]] = {}

    def restart(self) -> None:
        """Forget what was prepared, after memory was given back."""
        self._prepared.clear()

    def step(self, lengths: Sequence[int]) -> None:
        """Commit this step's share. A refusal ends the attempt: the growth itself will ask again, and say so."""
        for part, (at, left) in enumerate(self._growth.boundaries(lengths)):
            if left >= self._distance:
                continue
            if part not in self._prepared or self._prepared[part][0] != at:
                self._prepared[part] = (at, deque(self._growth.upcoming(part)))
            pieces = self._prepared[part][1]
            share = [pieces.popleft() for _ in range(-(-len(pieces) // (left + 1)))]
            if share and not self._commit(share):
                pieces.clear()

    def quiet_until(self, part: int, at: int) -> int:
        """Tokens up to which a part that grows beyond `at` needs no step."""
        prepared = self._prepared.get(part)
        return at if prepared is not None and prepared[0] == at and not prepared[1] else at - self._distance

    def _commit(self, pieces: Sequence[Piece]) -> bool:
        ranges: list[list[ByteRange]] = [[] for _ in self._backing.reservations]
        for reservation, piece in pieces:
            ranges[reservation].append(piece)
        try:
            self._backing.commit(ranges)
        except NativeError:
            return False
        return True
