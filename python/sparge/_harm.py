"""What skipping in a head does to a language model: one backward pass, then each setting on recorded tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Iterator, Mapping

from . import _attention
from ._capture import _Recorder
from ._plain import Call, plain

if TYPE_CHECKING:
    import torch

    from ._layers import Layer

# Floors 1 - tau: from nearly nothing skipped to little more than what is always kept. A step is a fifth of the tiles.
FLOORS = (0.0004, 0.0015, 0.004, 0.009, 0.018, 0.035, 0.065, 0.12, 0.22, 0.4)
# PV skip that goes with a floor: lambda = this - log(floor). On four layers of SmolLM2 it added less than a twentieth to
# the harm of the selection, and left out up to a tenth of PV.
_SKIP_ROOM = 2.0
_CHUNK = 512  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class Setting:
    """Of a head, beside its precision."""

    floor: float | None  # 1 - tau; None: every tile

    @property
    def tau(self) -> float:
        return 1.0 if self.floor is None else 1.0 - self.floor

    @property
    def pv_skip(self) -> float:
        return math.inf if self.floor is None else _SKIP_ROOM - math.log(self.floor)


SETTINGS = (Setting(None), *map(Setting, FLOORS))


@dataclass
class HeadTable:
    """A head in one sample. Lists have an entry per setting."""

    size: float  # sum of squares of the dense result
    round_l1: float
    qk: list[float]  # share of the tiles that are computed
    pv: list[float]  # share of the PV row groups
    error: list[float]  # sum of squares of what skipping changes, with PV skip
    skip_harm: list[float]  # nats, by what skipping changes
    all_harm: list[float]  # nats, by skipping and 8-bit rounding


@dataclass
class LayerTable:
    """A layer in one sample."""

    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool
    tiles: int  # of each head, that can be seen
    heads: list[HeadTable]

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> LayerTable:
        return cls(**{**stored, "heads": [HeadTable(**head) for head in stored["heads"]]})


# ------------------------------------------------------------------ the model


def flat_mask(value: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Which of the tokens of a batch, one sequence after the other, are no padding."""
    import torch

    given = value.get("attention_mask") if isinstance(value, Mapping) else None
    if given is None or given.dim() != 2:
        return torch.ones(hidden.shape[0] * hidden.shape[1], dtype=torch.bool)
    return given.bool().flatten()


def hidden_states(model: Any, value: Any) -> torch.Tensor:
    """What the logits are made of: (batch, tokens, width)."""
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if key not in ("labels", "use_cache")}
        return model.base_model(**kept, use_cache=False).last_hidden_state  # type: ignore[no-any-return]
    given = value if isinstance(value, tuple) else (value,)
    return model.base_model(*given, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


def log_likelihoods(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Of all tokens that may come next, for some rows of hidden states."""
    return model.get_output_embeddings()(hidden).float().log_softmax(-1)  # type: ignore[no-any-return]


def divergence(model: Any, exact: torch.Tensor, other: torch.Tensor, counted: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of the next token's distribution from that of `exact`, in nats per token."""
    total = 0.0
    rows_exact, rows_other = exact.flatten(0, 1)[counted], other.flatten(0, 1)[counted]
    for begin in range(0, len(rows_exact), _CHUNK):
        p = log_likelihoods(model, rows_exact[begin : begin + _CHUNK])
        q = log_likelihoods(model, rows_other[begin : begin + _CHUNK])
        total += float((p.exp() * (p - q)).sum(dtype=p.dtype).double())
    return max(total / len(rows_exact), 0.0)  # rounding of two equal distributions may be below 0


def _score_gradient(model: Any, hidden: torch.Tensor, counted: torch.Tensor, seed: int) -> torch.Tensor:
    """Of the log-likelihood of tokens that the model draws itself: its mean is 0, and half of its mean square in a
    direction is the divergence that a step in that direction causes (Fisher information)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    leaf = hidden.detach().flatten(0, 1).requires_grad_(True)
    for rows in counted.nonzero()[:, 0].split(_CHUNK):
        scores = log_likelihoods(model, leaf[rows])
        drawn = torch.multinomial(scores.detach().exp(), 1, generator=generator)
        scores.gather(1, drawn).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.unflatten(0, hidden.shape[:2])


# ------------------------------------------------------------------ one backward pass


@dataclass
class Sample:
    """A call of a layer, heads first, with the gradient of its result."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    scale: float
    gradient: torch.Tensor


class Graded(_Recorder):
    """Records the calls of one forward pass after the other, and then the gradients of their results."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._seen = True  # not while a backward pass computes what was not kept again
        self._calls: dict[tuple[str, str], tuple[dict[str, Any], dict[str, str], int, slice]] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._shown: set[str] = set()  # layers of the pass at hand

    def _attach(self, layer: Layer, stack: contextlib.ExitStack) -> None:
        layer.graders.append(self._grade)
        stack.callback(layer.graders.remove, self._grade)

    def _grade(self, layer: Layer, q: Any, k: Any, v: Any, out: torch.Tensor, **call: Any) -> None:
        if self._seen:
            if layer.name in self._shown:
                raise ValueError(f"loss=: {layer.name} attends twice in one pass, and its gradients cannot be told apart")
            self._shown.add(layer.name)
            self._watch(layer, q, k, v, nhd=False, **call)
            out.register_hook(functools.partial(self._gradients.__setitem__, layer.name))

    def _record(
        self, layer: str, name: str, qkv: tuple[Any, Any, Any], scale: float | None, call: Call, item: int
    ) -> None:
        super()._record(layer, name, qkv, scale, call, item)
        if (layer, name) in self._calls:
            queries = plain(call, item, qkv[0].shape[1], qkv[1].shape[1]).queries
            self._calls[layer, name] = (*self._calls[layer, name][:2], item, queries)

    def _keep(self, layer: str, name: str, tensors: dict[str, Any], metadata: dict[str, str]) -> int:
        self._calls[layer, name] = (tensors, metadata, 0, slice(None))
        gradient = 4 * tensors["q"].shape[0] * tensors["q"].shape[1] * tensors["v"].shape[2]
        return gradient + sum(t.numel() * t.element_size() for t in tensors.values())

    def run(self, value: Any, seed: int) -> torch.Tensor:
        """The last hidden states. What was recorded is in `take`."""
        self._calls.clear()
        self._gradients.clear()
        self._shown.clear()
        model: Any = self._model
        self._seen = True
        hidden = hidden_states(model, value)
        self._seen = False
        hidden.backward(_score_gradient(model, hidden, flat_mask(value, hidden), seed))
        return hidden.detach()

    def take(self) -> Iterator[tuple[str, str, Sample]]:
        """(layer, sample, what it is) of the last run, each once: memory is given back on the way."""
        for layer, name in list(self._calls):
            tensors, metadata, item, queries = self._calls.pop((layer, name))
            gradient = self._gradients[layer][item, queries].transpose(0, 1)
            scale = float(metadata["scale"])
            yield layer, name, Sample(**tensors, causal=metadata["causal"] == "true", scale=scale, gradient=gradient)


@contextlib.contextmanager
def differentiable(model: Any) -> Iterator[None]:
    """While open, gradients reach the results of attention, and nothing else has any; what a layer computes inside is
    computed again in the backward pass, because keeping it would take gigabytes."""
    import torch

    wanted = [p for p in model.parameters() if p.requires_grad]
    modes = {module: module.training for module in model.modules()}
    embedding = model.get_input_embeddings().register_forward_hook(lambda *given: given[2].requires_grad_(True))
    supported = bool(getattr(model, "supports_gradient_checkpointing", False))
    again = any(getattr(module, "gradient_checkpointing", False) for module in modes)
    try:
        model.requires_grad_(False)
        if supported and not again:
            _checkpointing(model, "enable", gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in modes:
            # Layers look at their own mode before they save memory; those inside, with dropout, stay as they are.
            module.training = bool(getattr(module, "gradient_checkpointing", False))
        with torch.enable_grad():
            yield
    finally:
        embedding.remove()
        if supported and not again:
            _checkpointing(model, "disable")
        for module, mode in modes.items():
            module.training = mode
        for parameter in wanted:
            parameter.requires_grad_(True)


def _checkpointing(model: Any, what: str, **options: Any) -> None:
    """By its name in this version of transformers."""
    newer = getattr(model, f"activation_checkpointing_{what}", None)
    if newer is not None:
        newer(**{key.replace("gradient", "activation"): value for key, value in options.items()})
    else:
        getattr(model, f"gradient_checkpointing_{what}")(**options)


# ------------------------------------------------------------------ one layer


def _harm(gradient: torch.Tensor, change: torch.Tensor) -> list[float]:
    """Of each head, in nats, for changed results: half the square of what each row does to the log-likelihood. Rows count
    as independent; docs/python-tuning.md has what that gives."""
    return (0.5 * (gradient * change).sum(-1).square().sum(-1).double()).tolist()  # type: ignore[no-any-return]


def _squares(change: torch.Tensor) -> list[float]:
    return change.square().sum((-1, -2)).double().tolist()  # type: ignore[no-any-return]


def measure(sample: Sample, threads: int | None) -> LayerTable:
    """Every setting in every head of a layer."""
    q, k, v, gradient = (t.float() for t in (sample.q, sample.k, sample.v, sample.gradient))
    options: dict[str, Any] = dict(causal=sample.causal, scale=sample.scale, threads=threads, return_stats=True)
    # 16 bits stand for exact results: their error is a hundredth of that of 8 bits.
    exact, _ = _attention.attention(q, k, v, select="all", pv_skip="off", precision="int16", **options)
    dense, _ = _attention.attention(q, k, v, select="all", pv_skip="off", precision="int8", **options)
    rounds = ((dense - exact).abs().sum((-1, -2)) / exact.abs().sum((-1, -2)).clamp_min(1e-30)).tolist()
    sizes, tiles = _squares(dense), 0
    heads = [HeadTable(size, round_l1, [], [], [], [], []) for size, round_l1 in zip(sizes, rounds)]
    for setting in SETTINGS:
        result, counts = dense, [(1, 1, 1, 1)] * len(heads)
        if setting.floor is not None:
            result, stats = _attention.attention(
                q, k, v, select="floor", theta=-1.0, tau=setting.tau, pv_skip=setting.pv_skip, precision="int8", **options
            )
            counts, tiles = stats.heads, stats.heads[0][0]
        rows = zip(heads, counts, _squares(result - dense), _harm(gradient, result - dense), _harm(gradient, result - exact))
        for head, (qk, qk_computed, pv, pv_computed), error, skip_harm, all_harm in rows:
            head.qk.append(qk_computed / qk)
            head.pv.append(pv_computed / pv)
            head.error.append(error)
            head.skip_harm.append(skip_harm)
            head.all_harm.append(all_harm)
    return LayerTable(k.shape[0], q.shape[2], v.shape[2], sample.causal, tiles, heads)
