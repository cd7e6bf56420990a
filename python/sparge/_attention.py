"""sparge.attention and the functions beside it, over arrays of any library."""

from __future__ import annotations

import difflib
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable, Literal, Sequence, TypedDict, Union

import numpy as np

from . import _arrays, _core, _gpu

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._calibration import Calibration

Precision = Literal["fp32", "int16", "int8"]
PerHead = Union[float, Sequence[float]]


class Options(TypedDict, total=False):
    """Keyword arguments of `attention`, `predict`, `reference` and `calibrate`."""

    layout: Literal["HND", "NHD"]
    causal: bool
    query_offset: int | None
    window: int | None
    scale: float | None
    softcap: float | None
    mask: Any
    alibi_slopes: Sequence[float] | None
    sink_logits: Sequence[float] | None
    precision: Precision | Sequence[Precision] | None
    select: Literal["auto", "all", "cdf", "topk", "floor", "map"] | None
    theta: PerHead
    tau: PerHead
    topk: PerHead
    pv_skip: PerHead | Literal["off"] | None
    predictor: Literal["default", "keys", "paper"]
    keep_sink: bool
    dense_tail: int
    map: Any
    calibration: Calibration | None
    target_l2: float | None
    pv_l2: float | None
    target_l1: float | None
    pv_l1: float | None
    round_l1: float | None
    seed: int
    grid: Sequence[int] | None
    text_tokens: int
    text_after: bool
    q_offsets: Sequence[int]
    kv_offsets: Sequence[int]
    threads: int | None
    stream: int | None


@dataclass(frozen=True)
class Stats:
    """What a call did. Tiles are 128 queries x 64 keys; PV is counted in groups of `group_rows` query rows."""

    time_ms: float
    stages_ms: dict[str, float]
    isa: str
    threads: int
    group_rows: int
    qk_tiles: dict[str, int]
    pv_tiles: dict[str, int]
    sparsity: float
    work: float
    heads: list[tuple[int, int, int, int]]
    """Per sequence and head: QK tiles eligible and computed, PV row groups eligible and computed."""

    def __repr__(self) -> str:
        tiles = f"{self.qk_tiles['computed']} of {self.qk_tiles['eligible']} tiles"
        return f"Stats({self.time_ms:.2f} ms, {tiles}: {self.sparsity:.1%} skipped, {self.isa}, {self.threads} threads)"

    @property
    def head_sparsity(self) -> list[float]:
        """1 - QK tiles computed / eligible of each head, sequence by sequence."""
        return [1 - computed / eligible if eligible else 0.0 for eligible, computed, _, _ in self.heads]


_NAMED_ELSEWHERE = {
    "is_causal": "causal", "attn_mask": "mask", "attention_mask": "mask", "sm_scale": "scale", "softmax_scale": "scale",
    "scaling": "scale", "tensor_layout": "layout", "logits_soft_cap": "softcap", "attn_bias": "mask", "window_size": "window",
    "sliding_window": "window", "sinks": "sink_logits", "slopes": "alibi_slopes", "num_threads": "threads",
    "target": "target_l2",
}  # fmt: skip


def _check_names(options: Options) -> None:
    """Names of other libraries, and slips, get an error that has ours."""
    known = Options.__annotations__
    for name in options:
        if name not in known:
            alike = difflib.get_close_matches(name, known, 1)
            ours = _NAMED_ELSEWHERE.get(name) or (alike[0] if alike else None)
            hint = "" if ours is None else f"; do you mean '{ours}'?"
            raise TypeError(f"unexpected keyword argument '{name}'{hint}")


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


def _outputs(q: Any, v: Any, out: Any, with_lse: bool, options: Options) -> tuple[Any, Any]:
    """Memory for the result, unless the caller gave it, and for the log-sum-exp."""
    out_shape, lse_shape = _arrays.shapes_of_outputs(_shape(q), _shape(v), options.get("layout") == "NHD")
    if out is None:
        out = _arrays.empty_like(q, out_shape)
    return out, _arrays.empty_like(q, lse_shape, float32=True) if with_lse else None


def _importable(options: Options) -> tuple[Any, Any]:
    """Makes what the extension module takes of the arrays among the options. Returns their owners: views do not own."""
    _check_names(options)
    mask, blocks = options.get("mask"), options.get("map")
    if mask is not None:
        mask = _arrays.wrapped("mask", mask)
        options["mask"] = _arrays.importable("mask", mask)
    if blocks is not None:
        options["map"] = blocks = _arrays.wrapped("map", blocks)
    return mask, blocks


def _stats(call: _core.CallStats) -> Stats:
    return Stats(**call.fields())


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    out: Any = None,
    return_lse: bool = False,
    return_stats: bool = False,
    **options: Unpack[Options],
) -> Any:
    """softmax(q k^T * scale) v, skipping what does not matter within the error that you name.

    q is (N, D), (H, N, D) or (B, H, N, D); k and v likewise, with H a multiple of their number of heads. float32,
    float16 and bfloat16, anything with DLPack or the buffer protocol, any strides; nothing is copied unless a last
    dimension is not contiguous. The result has q's type and library. With `return_lse` and `return_stats` a tuple
    (out, lse, stats) of what was asked for; lse is the log of the sum of exponentials per query, float32.

    What is computed:
      layout        "HND" (default): heads before tokens; "NHD": tokens before heads
      causal        query i sees keys j <= i + query_offset
      query_offset  default keys - queries: the last query sees all keys
      window        also j > i + query_offset - window
      scale         default D**-0.5
      softcap       score = softcap * tanh(score / softcap)
      mask          bool or uint8 (true may attend) or float32/float16 (added to the scaled score); shape broadcasts to
                    (B, H, Nq, Nk), but for the last dimension
      alibi_slopes, sink_logits   one value per head
      grid          (T, H, W) of image or video tokens in raster order, with `text_tokens` tokens before them, or after
                    them if `text_after`: blocks then follow a Hilbert curve through the grid; same result
      q_offsets, kv_offsets   packed batch without batch dimension: sequence b has tokens offsets[b] to offsets[b + 1]

    How exactly:
      target_l2     relative L2 error per head that skipping may cause (default 0.03); 0 = exact, in fp32 unless told
      pv_l2         the same with PV skip (default 1.25 target_l2)
      target_l1, pv_l1   bounds of the relative L1 error instead
      round_l1      relative L1 error of 8-bit arithmetic beyond which a head takes 16 bits (default 0.05)
      calibration   a sparge.Calibration, made once per layer with these bounds: remembers what it measured
      precision     "int8" (default), "int16" or "fp32", for all heads or a list with one for each

      dense_tail    all tiles for the last so many queries (their whole blocks): those a language model goes on from

    By hand instead (docs/command-line.md): select "all", "cdf", "topk", "floor" or "map" with theta, tau, topk, pv_skip
    (numbers, or lists with one per head; pv_skip="off"), map, predictor, keep_sink.

    threads: default sparge.get_num_threads(). Results do not depend on it.

    On an NVIDIA GPU, where all arrays then are (docs/cuda.md says what a GPU refuses): tensors of PyTorch, in its current
    stream, or arrays with DLPack, in `stream`, an address as DLPack has it (default: CUDA's default stream). New memory,
    that of the work included, is of q's library. The call returns before the result is there.
    """
    gpu = _gpu.ordinal_of(q)
    if gpu is not None:
        _check_names(options)
        return _gpu.attention(gpu, q, k, v, out, return_lse, return_stats, options)
    return attend(_core.attention, q, k, v, out, return_lse, return_stats, options)


def attend(
    run: Callable[..., _core.CallStats | None],
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    return_lse: bool,
    return_stats: bool,
    options: Options,
) -> Any:
    """`attention` by a function of the extension module."""
    q, k, v = _arrays.wrapped("q", q), _arrays.wrapped("k", k), _arrays.wrapped("v", v)
    result, lse = _outputs(q, v, out, return_lse, options)
    view = _arrays.importable
    owners = _importable(options)  # noqa: F841: alive until the call is over
    memory = _arrays.wrapped("out", result, output=True)
    stats = run(view("q", q), view("k", k), view("v", v), view("out", memory), lse, return_stats, options)
    if out is None:
        result = _arrays.as_kind_of(q, result)
    if not return_lse and not return_stats:
        return result
    returned = [result]
    if return_lse:
        returned.append(_arrays.as_kind_of(q, lse))
    if stats is not None:
        returned.append(_stats(stats))
    return tuple(returned)


def predict(q: Any, k: Any, **options: Unpack[Options]) -> tuple[np.ndarray[Any, Any], Stats]:
    """Stage 1 alone: the map of tiles that `attention` would compute, as bool (B, H, ceil(Nq/128), ceil(Nk/64)) less the
    dimensions that q lacks, and its figures. In a packed batch, B counts its sequences and Nq, Nk are the longest."""
    q, k = _arrays.wrapped("q", q), _arrays.wrapped("k", k)
    owners = _importable(options)  # noqa: F841: alive until the call is over
    blocks = np.zeros(_map_shape(q, k, options), np.uint8)
    stats = _core.predict(_arrays.importable("q", q), _arrays.importable("k", k), blocks, options)
    return blocks.astype(bool), _stats(stats)


def _map_shape(q: Any, k: Any, options: Options) -> tuple[int, ...]:
    """Of the map that `predict` fills. Shapes that do not fit one another are left to the extension module to refuse."""
    shape = _shape(q)

    def tokens(name: str, of: tuple[int, ...]) -> int:
        offsets: Any = options.get(f"{name}_offsets")
        if offsets is not None:
            return max((int(end) - int(begin) for begin, end in zip(offsets, offsets[1:])), default=0)
        return of[-3] if tokens_first and len(of) >= 3 else of[-2]

    if not all(2 <= len(of) <= 4 for of in (shape, _shape(k))):
        return (0,)
    tokens_first = options.get("layout") == "NHD"
    heads = () if len(shape) < 3 else (shape[-2 if tokens_first else -3],)
    q_offsets = options.get("q_offsets")
    sequences = shape[:-3] if q_offsets is None else (max(len(q_offsets) - 1, 0),)
    blocks = [(tokens("q", shape), _core.BLOCK_Q), (tokens("kv", _shape(k)), _core.BLOCK_K)]
    return (*sequences, *heads, *(-(-max(count, 0) // size) for count, size in blocks))


def reference(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """The slow oracle: the same problem in double precision, nothing skipped but what `map` leaves out."""
    q, k, v = _arrays.wrapped("q", q), _arrays.wrapped("k", k), _arrays.wrapped("v", v)
    result, lse = _outputs(q, v, None, return_lse, options)
    view = _arrays.importable
    owners = _importable(options)  # noqa: F841: alive until the call is over
    _core.reference(view("q", q), view("k", k), view("v", v), view("out", result), lse, options)
    result = _arrays.as_kind_of(q, result)
    return (result, _arrays.as_kind_of(q, lse)) if return_lse else result


def calibrate(  # type: ignore[misc]  # `calibration` is an option, too
    q: Any, k: Any, v: Any, calibration: Calibration, *, effort: float = 0.25, **options: Unpack[Options]
) -> None:
    """Measures for `calibration` without computing a result, in about `effort` of the time of a dense call."""
    if calibration is None:
        raise TypeError("calibration=None is no sparge.Calibration")
    q, k, v = _arrays.wrapped("q", q), _arrays.wrapped("k", k), _arrays.wrapped("v", v)
    view = _arrays.importable
    options["calibration"] = calibration
    owners = _importable(options)  # type: ignore[arg-type]  # noqa: F841: alive until the call is over
    _core.calibrate(view("q", q), view("k", k), view("v", v), effort, options)


def merge(*parts: tuple[Any, Any], threads: int | None = None) -> tuple[Any, Any]:
    """(out, lse) over the keys of all parts together, from the (out, lse) of each, heads before tokens; exact.

    Any number of parts, of one shape; a query that saw no key of a part (lse -inf) takes nothing from it. The result
    has the type and library of the first part. threads: as in `attention`; results do not depend on it.
    """
    for i, part in enumerate(parts):
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise TypeError(f"parts[{i}]: {type(part).__name__} is no pair (out, lse)")
    if not parts:
        raise ValueError("parts is empty: merge needs one or more")
    arrays = [
        [(name, _arrays.wrapped(name, array)) for name, array in zip((f"parts[{i}]", f"parts[{i}] lse"), part)]
        for i, part in enumerate(parts)
    ]
    first, first_lse = arrays[0][0][1], arrays[0][1][1]
    out = _arrays.empty_like(first, _shape(first))
    lse = _arrays.empty_like(first, _shape(first_lse), float32=True)
    views = [(_arrays.importable(*part), _arrays.importable(*part_lse)) for part, part_lse in arrays]
    _core.merge(views, _arrays.importable("out", out), lse, threads or 0)
    return _arrays.as_kind_of(first, out), _arrays.as_kind_of(first, lse)


def token_order(grid: Iterable[int], order: str = "hilbert", seed: int = 0) -> np.ndarray[Any, Any]:
    """Raster indices of the tokens of a grid (T, H, W) in the order "hilbert", "row-major", "time-major" or "random"."""
    sides = [operator.index(side) for side in grid]
    cells = 1
    for side in sides:
        cells *= max(side, 0)
    out = np.empty(min(cells, 2**31), np.int64)
    _core.token_order(order, sides, seed, out)
    return out
