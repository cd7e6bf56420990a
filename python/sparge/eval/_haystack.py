"""A haystack of our own: plain sentences about nothing in particular, as many as are wanted, never twice in a row alike."""

from __future__ import annotations

import random
from typing import Iterator

_WHO = (
    "The gardener", "An old sailor", "The librarian", "A travelling musician", "The baker of the village", "My neighbour",
    "The ferryman", "A young teacher", "The watchmaker", "The keeper of the lighthouse", "A retired engineer", "The painter",
)  # fmt: skip
_DID = (
    "walked along the river and counted the boats", "repaired a wooden fence before the rain came",
    "wrote a long letter to a friend in the mountains", "carried two baskets of apples to the market",
    "listened to the bells from the other side of the valley", "planted a row of lime trees behind the school",
    "read an old book about the stars", "mixed blue and yellow until the colour was right",
    "waited for the evening train, which was late as usual", "drew a map of the paths through the forest",
    "swept the floor and opened all the windows", "told the children a story about a clever fox",
)  # fmt: skip
_WHY = (
    "because the morning was bright", "although nobody had asked for it", "while the wind turned to the north",
    "as every year in early autumn", "so that the winter would be easier", "and thought of nothing else all day",
    "until the lamps were lit", "as if there were no hurry in the world", "for the light was still good",
    "since the road was dry at last",
)  # fmt: skip
_AFTER = (
    "In the evening there was soup and bread.", "The clouds moved slowly over the hills.",
    "Somebody played the violin two houses away.", "It is a small thing, but such things make a day.",
    "The cat slept on the warm stones.", "Nobody remembered afterwards who had begun it.",
    "Later the fog came up from the water.", "That is how most days passed there.",
)  # fmt: skip


def sentences(seed: int) -> Iterator[str]:
    """Without end; the same for the same seed."""
    choose = random.Random(seed)
    while True:
        yield f"{choose.choice(_WHO)} {choose.choice(_DID)} {choose.choice(_WHY)}."
        if choose.random() < 0.4:
            yield choose.choice(_AFTER)
