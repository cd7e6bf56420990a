"""Which setting each head shall have, from what it costs and what it harms: numbers only."""

from __future__ import annotations

from typing import NamedTuple, Sequence


class Option(NamedTuple):
    """One way to compute a head."""

    cost: float  # work; any unit, the same for all heads
    harm: float  # what the model loses by it; any unit, the same for all heads


def hull(options: Sequence[Option]) -> list[int]:
    """Those on the lower convex hull, from the least harm to the least cost: from one to the next each saves less per
    harm than the one before. All others are beaten by a mixture of these."""
    order = sorted(range(len(options)), key=lambda i: (options[i].harm, options[i].cost, i))
    kept: list[int] = []
    for i in order:
        if kept and options[i].cost >= options[kept[-1]].cost:
            continue
        while len(kept) >= 2 and _price(options, kept[-2], kept[-1]) >= _price(options, kept[-1], i):
            kept.pop()
        kept.append(i)
    return kept


def _price(options: Sequence[Option], this: int, cheaper: int) -> float:
    """Harm per cost that is saved, on the way from one option to a cheaper one."""
    return (options[cheaper].harm - options[this].harm) / (options[this].cost - options[cheaper].cost)


def choose(heads: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """An option for each head: the cheapest whose harm together stays within `budget`, but for what the last step that
    does not fit would have saved. Every head pays the same price per harm. If even the least harm is beyond the budget,
    that is what each head gets."""
    hulls = [hull(options) for options in heads]
    chosen = [kept[0] for kept in hulls]
    total = sum(options[i].harm for options, i in zip(heads, chosen))
    steps = sorted(
        (_price(heads[head], this, cheaper), head, this, cheaper)
        for head, kept in enumerate(hulls)
        for this, cheaper in zip(kept, kept[1:])
    )
    for _, head, this, cheaper in steps:  # along a hull the price rises: steps of a head come in its order
        more = heads[head][cheaper].harm - heads[head][this].harm
        if total + more > budget:
            break
        total += more
        chosen[head] = cheaper
    return chosen
