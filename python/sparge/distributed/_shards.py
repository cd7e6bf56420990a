"""Which tokens of a sequence a rank has: whole blocks of queries, so that blocks of a part are blocks of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Sequence

from .. import _core

Shard = Literal["contiguous", "zigzag"]
SHARDS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Segment:
    """Tokens [first, first + count) of the whole, which are tokens [at, at + count) of the rank that has them."""

    first: int
    count: int
    at: int

    @property
    def end(self) -> int:
        return self.first + self.count


def check_shard(shard: str) -> None:
    if shard not in SHARDS:
        raise ValueError(f"shard={shard!r} is none of {', '.join(SHARDS)}")


def segments(tokens: int, rank: int, ranks: int, shard: str) -> list[Segment]:
    """What `rank` has, in ascending order; nothing if there are fewer blocks than ranks. In a zigzag it has a piece of
    the first half of the sequence and its counterpart of the second half: under a causal mask, early queries see few
    keys and late ones many."""
    check_shard(shard)
    if tokens < 0 or not 0 <= rank < ranks:
        raise ValueError(f"tokens={tokens}, rank={rank}, ranks={ranks}: no such part of a sequence")
    blocks = -(-tokens // _core.BLOCK_Q)
    pieces = ranks if shard == "contiguous" else 2 * ranks
    mine = [rank] if shard == "contiguous" else [rank, 2 * ranks - 1 - rank]
    found: list[Segment] = []
    for piece in mine:
        first = min(piece * blocks // pieces * _core.BLOCK_Q, tokens)
        count = min((piece + 1) * blocks // pieces * _core.BLOCK_Q, tokens) - first
        if count == 0:
            continue
        if found and found[-1].end == first:  # neighbours are one
            last = found.pop()
            found.append(Segment(last.first, last.count + count, last.at))
        else:
            at = found[-1].at + found[-1].count if found else 0
            found.append(Segment(first, count, at))
    return found


def count_tokens(parts: Sequence[Segment]) -> int:
    return sum(part.count for part in parts)
