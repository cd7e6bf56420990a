"""What a call reduces to when it is recorded: full or causal attention without a mask, or a reason why not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sparge._plain import Call, Inexpressible, plain  # noqa: E402

HEADS, DIM = 2, 32


def call(**changes: Any) -> Call:
    nothing = dict(mask=None, causal=False, query_offset=0, window=0, softcap=0.0, sinks=None, grid=None)
    return Call(**{**nothing, **changes})


def test_masks_that_say_full_or_causal_are_understood() -> None:
    triangle = torch.ones(8, 8, dtype=torch.bool).tril()
    additive = torch.zeros(8, 8).masked_fill(~triangle, float("-inf"))
    for mask in (triangle, additive, triangle[None, None].expand(1, HEADS, 8, 8)):
        part = plain(call(mask=mask), 0, 8, 8)
        assert (part.queries, part.keys, part.causal) == (slice(0, 8), slice(0, 8), True)
    full = plain(call(mask=torch.ones(8, 10, dtype=torch.bool)), 0, 8, 10)
    assert (full.queries, full.keys, full.causal) == (slice(0, 8), slice(0, 10), False)


def test_padding_is_cut_off() -> None:
    left, right = torch.ones(2, 1, 1, 8, dtype=torch.bool).unbind(0)
    padding = torch.stack([left, right])
    padding[0, ..., :3] = False
    padding[1, ..., 6:] = False
    for causal in (False, True):
        for mask in (padding, padding.expand(2, 1, 8, 8)):
            for item, span in enumerate((slice(3, 8), slice(0, 6))):
                part = plain(call(mask=mask, causal=causal), item, 8, 8)
                assert (part.queries, part.keys, part.causal) == (span, span, causal)
    crossed = plain(call(mask=padding), 0, 5, 8)
    assert (crossed.queries, crossed.keys) == (slice(0, 5), slice(3, 8))


def test_chunks_end_with_the_last_key() -> None:
    chunk = plain(call(causal=True, query_offset=6), 0, 4, 10)
    assert (chunk.keys, chunk.causal) == (slice(0, 10), True)
    unwritten = plain(call(causal=True, query_offset=0), 0, 4, 10)  # PyTorch's is_causal: the first query sees one key
    assert (unwritten.keys, unwritten.causal) == (slice(0, 4), True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"softcap": 30.0}, "softcap 30"),
        ({"sinks": torch.zeros(HEADS)}, "sink"),
        ({"window": 4, "causal": True}, "window of 4"),
        ({"mask": torch.randn(8, 8)}, "bias"),
        ({"mask": torch.ones(8, 8).tril().triu(-3).bool()}, "neither full nor causal"),  # a window, written out
        ({"mask": torch.ones(8, 8).tril(-1).bool(), "causal": True}, "neither full nor causal"),
        ({"mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)}, "holes"),
        ({"mask": torch.zeros(1, 8, dtype=torch.bool)}, "hides everything"),
        ({"mask": torch.stack([torch.ones(8, 8).tril(), torch.ones(8, 8)])[None].bool()}, "between heads"),
        ({"causal": True, "query_offset": 3}, "offset of 3"),
        ({"mask": torch.ones(8, 8).tril().bool(), "grid": [1, 2, 4, 0, 0]}, "grid"),
    ],
)
def test_what_cannot_be_expressed_says_why(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Inexpressible, match=reason):
        plain(call(**changes), 0, 8, 8)


def test_window_without_effect_is_none() -> None:
    assert plain(call(window=8, causal=True), 0, 8, 8).causal
