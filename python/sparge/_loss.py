"""sparge.tune(loss=...): what a language model may lose as a whole, spread over its heads where it harms least."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from . import _core, _harm
from ._capture import Layers, _exact_layers
from ._choice import Option, choose
from ._command import Bar
from ._harm import SETTINGS, LayerTable
from ._presets import Preset

_FORMAT = "sparge-loss-partial"
_VERIFICATIONS = 4  # at most; each is a pass over the held-out input
_CHOICES = 16  # at most; some are the same, and verified once
_CLOSE = 0.85  # of the loss that was asked for: more of it is not worth another verification
_AIM = 0.95  # a correction aims a little below, because one that lands above is of no use
_POWERS = (0.25, 2.0)  # of the budget, by which a loss is believed to grow
_LEAST_SHARE = 0.1  # of the loss: less than that is no measure of how far a budget may grow at once
_INT16_COST = 1.6  # of a tile in 16 bits against 8: 1.55 and 1.67 in docs/performance.md

Tables = dict[str, dict[str, LayerTable]]  # by layer and sample
Choice = tuple[int, ...]  # for each head, the number of an option


class LossWarning(UserWarning):
    """What a preset made by loss= could not be, or was not verified for."""


def tune_loss(
    model: Any,
    inputs: Iterable[Any] | None,
    loss: float,
    out: Path,
    *,
    seed: int,
    layers: Layers,
    restart: bool,
    threads: int | None,
    progress: bool,
    **recording: Any,
) -> Preset:
    """See sparge.tune."""
    given = list(inputs) if inputs is not None else []
    _check(model, given, loss)
    held_out = random.Random(seed).randrange(len(given)) if len(given) > 1 else None
    if held_out is None:
        text = "one input: it has to serve for measuring and for verifying, and nothing is held out; give two or more"
        warnings.warn(text, LossWarning, stacklevel=3)
    verified = given[held_out or 0]
    _check_length(verified)
    work = _Work(out, _options(model, loss, seed, layers, recording), _digest(model, given), restart)
    with Bar("measuring", None, progress) as bar:
        tuned_on = [i for i in range(len(given)) if i != held_out]
        recording = {"min_tokens": _core.MIN_KEYS, **recording}
        work.measure(model, {f"{i:04d}": given[i] for i in tuned_on}, bar, seed, threads, layers=layers, **recording)
        names = [] if held_out is None else [f"{held_out:04d}"]
        offers = Offers(work.tables, work.tokens, names, seed)
        found = _Search(model, verified, offers, loss, bar).run()
    if found.loss > loss:
        warnings.warn(
            f"loss={loss:g} is not reached: the preset loses {found.loss:g} nats per token, the least of what was tried; "
            "8-bit rounding or the choice of inputs may be the reason: see measured_loss in the preset",
            LossWarning,
            stacklevel=3,
        )
    offers.preset(found.chosen, loss, found.loss).core.write(os.fspath(out))
    work.forget()
    return Preset.read(out)


# ------------------------------------------------------------------ what is refused


def _check(model: Any, inputs: Sequence[Any], loss: float) -> None:
    if not (isinstance(loss, (int, float)) and math.isfinite(loss) and loss > 0):
        raise ValueError(f"loss={loss!r} is no number of nats per token above 0")
    if model is None or not inputs:
        raise ValueError("loss= needs a model and inputs to run it on")
    other = "; bound the error of every head instead: target_l2="
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise ValueError(f"loss= needs a language model of transformers, which is not installed{other}") from None
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(f"loss= needs a causal language model of transformers; {type(model).__name__} is none{other}")
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise ValueError(f"loss= needs the model on the CPU; {type(model).__name__} is elsewhere{other}")
    if not _splits(model, inputs[0]):
        raise ValueError(
            f"loss=: the logits of {type(model).__name__} are not its output embeddings of its last hidden states (a "
            f"softcap or a scale of logits){other}"
        )


def _check_length(value: Any) -> None:
    """An input that skips nothing would verify any preset."""
    ids = value.get("input_ids", value.get("inputs_embeds")) if isinstance(value, Mapping) else value
    ids = ids[0] if isinstance(ids, tuple) else ids
    tokens = ids.shape[1] if getattr(ids, "ndim", 0) >= 2 else 0
    if tokens < _core.MIN_KEYS:
        raise ValueError(
            f"loss=: the input to verify on has {tokens} tokens, and fewer than {_core.MIN_KEYS} tokens skip nothing: give "
            "longer inputs"
        )


def _splits(model: Any, value: Any) -> bool:
    """Whether logits can be made of hidden states some rows at a time; all of them together would be gigabytes."""
    import torch

    def short(item: Any) -> Any:
        return item[:, :16] if isinstance(item, torch.Tensor) and item.dim() >= 2 else item

    if isinstance(value, Mapping):
        value = {key: short(item) for key, item in value.items() if key not in ("labels", "use_cache")}
    else:
        value = tuple(map(short, value if isinstance(value, tuple) else (value,)))
    with torch.inference_mode():
        whole = model(**value) if isinstance(value, Mapping) else model(*value)
        if getattr(whole, "logits", None) is None:
            return False
        parts = _harm.log_likelihoods(model, _harm.hidden_states(model, value))
        return bool(torch.allclose(whole.logits.float().log_softmax(-1), parts, atol=1e-3))


# ------------------------------------------------------------------ what is measured, and kept


def _options(model: Any, loss: float, seed: int, layers: Layers, recording: Mapping[str, Any]) -> str:
    """What measured tables depend on (but for instruction sets, which round a little differently), and the loss."""
    chosen = "all" if layers is None else repr(layers)
    if callable(layers):
        chosen = repr([name for name, _ in model.named_modules() if layers(name)])
    more = "".join(f", {key} {value}" for key, value in sorted(recording.items()))
    return f"loss {loss:g}, seed {seed}, layers {chosen}{more}, sparge {_core.version()}"


def _digest(model: Any, inputs: Sequence[Any]) -> str:
    """Of the inputs and of some of each parameter."""
    import torch

    sums = hashlib.sha256(type(model).__name__.encode())

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            sums.update(f"{tuple(item.shape)}{item.dtype}".encode())
            sums.update(item.detach().flatten().float().numpy().tobytes())
        elif isinstance(item, (Mapping, tuple, list)):
            for part in item.items() if isinstance(item, Mapping) else item:
                add(part)
        else:
            sums.update(repr(item).encode())

    for name, parameter in model.named_parameters():
        sums.update(name.encode())
        add(parameter.flatten()[:256])
    add(list(inputs))
    return sums.hexdigest()


class _Work:
    """Tables of all layers and samples; those that are finished are on the disk."""

    def __init__(self, out: Path, options: str, digest: str, restart: bool) -> None:
        self.tables: Tables = {}
        self.tokens: dict[str, int] = {}  # of each sample
        self._file = out.with_name(out.name + ".partial")
        self._head = {"format": _FORMAT, "version": 1, "options": options, "inputs": digest}
        if not restart and self._file.exists():
            self._resume()

    def _resume(self) -> None:
        ways = "; delete it or give restart=True to begin anew"
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{self._file}: is no unfinished work of loss={ways}") from None
        if not isinstance(stored, dict) or stored.get("format") != _FORMAT or stored.get("version") != 1:
            raise ValueError(f"{self._file}: is no unfinished work of loss={ways}")
        for key, what in (("options", f"other options: {stored.get('options')}"), ("inputs", "another model or other inputs")):
            if stored.get(key) != self._head[key]:
                raise ValueError(f"{self._file}: was begun with {what}{ways}")
        try:
            self.tokens = {name: int(count) for name, count in stored["tokens"].items()}
            self.tables = {
                layer: {sample: LayerTable.of_json(table) for sample, table in samples.items()}
                for layer, samples in stored["tables"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"{self._file}: is damaged{ways}") from None

    def _save(self) -> None:
        tables = {layer: {sample: t.json() for sample, t in samples.items()} for layer, samples in self.tables.items()}
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps({**self._head, "tokens": self.tokens, "tables": tables}), encoding="utf-8")
            os.replace(temporary, self._file)
        finally:
            temporary.unlink(missing_ok=True)

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)

    def measure(
        self, model: Any, inputs: Mapping[str, Any], bar: Bar, seed: int, threads: int | None, **recording: Any
    ) -> None:
        """Fills the tables: for each input a backward pass, then layer by layer."""
        for number, (name, value) in enumerate(inputs.items(), 1):
            if name in self.tokens:  # finished by an earlier call
                continue
            title = f"input {number} of {len(inputs)}"
            bar.restart(f"{title}: gradients", 1)
            graded = _harm.Graded(model, sample=f"{name}.", **recording)
            try:
                with _harm.differentiable(model), graded:
                    hidden = graded.run(value, seed)
            except NotImplementedError as error:  # softcap or sinks, which PyTorch's own attention does not have
                raise ValueError(f"loss=: no gradients of {type(model).__name__}: {error}") from None
            if graded.files == 0:
                reasons = "; ".join(f"{layer}: {reason}" for layer, reason in list(graded.skipped.items())[:3])
                raise ValueError(
                    f"input {name}: no attention of {type(model).__name__} was recorded"
                    + (f" ({reasons})" if reasons else f": fewer than {recording['min_tokens']} tokens skip nothing")
                )
            bar.restart(f"{title}: layers", graded.files)
            for done, (layer, sample, tensors) in enumerate(graded.take(), 1):
                known = self.tables.setdefault(layer, {})
                if sample not in known:
                    known[sample] = _harm.measure(tensors, threads)
                    self._save()
                bar.at(done, graded.files)
            self.tokens[name] = int(_harm.flat_mask(value, hidden).sum())
            self._save()


# ------------------------------------------------------------------ what is chosen, and verified


@dataclass(frozen=True)
class _Found:
    """Parameters that were verified."""

    chosen: Choice
    budget: float  # what they were chosen with
    loss: float  # measured


class _Search:
    """Chooses within a predicted harm, verifies what that gives, and corrects the prediction."""

    def __init__(self, model: Any, value: Any, offers: Offers, loss: float, bar: Bar) -> None:
        self._model, self._value, self._offers, self._loss, self._bar = model, value, offers, loss, bar
        self.tried: list[_Found] = []

    def run(self) -> _Found:
        import torch

        self._bar.restart("verifying: exact", _VERIFICATIONS + 1)
        with torch.inference_mode():
            with _exact_layers(self._model):
                self._exact = _harm.hidden_states(self._model, self._value)
            budget = self._loss
            for _ in range(_CHOICES):
                self._bar.restart("verifying", _VERIFICATIONS + 1)
                self._bar.at(1 + self._verified())
                self.tried.append(self._try(budget))
                close = _CLOSE * self._loss <= self.tried[-1].loss <= self._loss
                if close or self._verified() == _VERIFICATIONS:
                    break
                budget = self._next()
        self._bar.finish()
        within = [found for found in self.tried if found.loss <= self._loss]
        return max(within, key=lambda f: f.budget) if within else min(self.tried, key=lambda f: f.loss)

    def _verified(self) -> int:
        """How many choices; two budgets may give the same one."""
        return len({found.chosen for found in self.tried})

    def _next(self) -> float:
        """Where the measured loss would be what was asked for: it grows like a power of the budget, at first like the
        budget itself. Between a budget that was too small and one that was too large, if there are both."""
        last, power = self.tried[-1], 1.0
        before = self.tried[-2] if len(self.tried) > 1 else last
        if before.loss != last.loss and min(before.loss, last.loss) > 0:
            power = math.log(last.loss / before.loss) / math.log(last.budget / before.budget)
            power = min(max(power, _POWERS[0]), _POWERS[1])
        guess = last.budget * (_AIM * self._loss / max(last.loss, _LEAST_SHARE * self._loss)) ** (1 / power)
        low = max((found.budget for found in self.tried if found.loss <= self._loss), default=0.0)
        high = min((found.budget for found in self.tried if found.loss > self._loss), default=math.inf)
        if low < guess < high:
            return guess
        return math.sqrt(low * high) if low > 0 and high < math.inf else guess

    def _try(self, budget: float) -> _Found:
        chosen = tuple(choose(self._offers.options, budget))
        for found in self.tried:
            if found.chosen == chosen:
                return _Found(chosen, budget, found.loss)
        return _Found(chosen, budget, self._measured(self._offers.preset(chosen, self._loss, 0.0)))

    def _measured(self, preset: Preset) -> float:
        from ._layers import Layer, Settings
        from .integrations import transformers as integration

        settings = Settings(preset=preset)
        with _exact_layers(self._model):
            for name, module in self._model.named_modules():
                if name in preset.layers:
                    setattr(module, integration._ATTRIBUTE, Layer(name, settings))
            hidden = _harm.hidden_states(self._model, self._value)
        loss = _harm.divergence(self._model, self._exact, hidden, _harm.flat_mask(self._value, hidden))
        if not math.isfinite(loss):
            raise ValueError(f"loss=: predictions for the input to verify on are not finite (divergence {loss})")
        return loss


class Offers:
    """What each head may do, and the file that a choice becomes."""

    def __init__(self, tables: Tables, tokens: Mapping[str, int], held_out: list[str], seed: int) -> None:
        self._tables, self._held_out, self._seed = tables, held_out, seed
        self._heads = [(layer, head) for layer in sorted(tables) for head in range(len(_any(tables[layer]).heads))]
        offers = [_head_options(list(tables[layer].values()), head, sum(tokens.values())) for layer, head in self._heads]
        self.options = [options for options, _ in offers]
        self._ways = [ways for _, ways in offers]

    def preset(self, chosen: Choice, loss: float, measured_loss: float) -> Preset:
        layers: dict[str, Any] = {}
        for (layer, head), ways, index in zip(self._heads, self._ways, chosen):
            samples = self._tables[layer]
            first = _any(samples)
            whole = layers.setdefault(
                layer,
                {"q_heads": len(first.heads), "kv_heads": first.kv_heads, "qk_dim": first.qk_dim, "v_dim": first.v_dim,
                 "causal": first.causal, "samples": sorted(samples), "held_out": self._held_out, "heads": []},
            )  # fmt: skip
            whole["heads"].append(_head_json(list(samples.values()), head, *ways[index]))
        bounds = {"loss": loss, "measured_loss": measured_loss}
        text = {"format": "sparge-preset", "version": 3, "made_by": f"sparge {_core.version()}", "bounds": bounds,
                "predictor": "keys", "seed": self._seed, "layers": layers}  # fmt: skip
        return Preset("the preset", json.dumps(text).encode())


def _any(samples: Mapping[str, LayerTable]) -> LayerTable:
    """For what all samples of a layer have in common."""
    return next(iter(samples.values()))


def _head_options(tables: Sequence[LayerTable], head: int, tokens: int) -> tuple[list[Option], list[tuple[str, int]]]:
    """What a head may do, and how that is called: precision, number of the setting."""
    options, ways = [], []
    for setting in range(len(SETTINGS)):
        cost = sum(t.tiles * (t.heads[head].qk[setting] + t.heads[head].pv[setting]) / 2 for t in tables)
        for precision, factor, harm in (
            ("int8", 1.0, sum(t.heads[head].all_harm[setting] for t in tables)),
            ("int16", _INT16_COST, sum(t.heads[head].skip_harm[setting] for t in tables)),
        ):
            options.append(Option(factor * cost, harm / tokens))
            ways.append((precision, setting))
    return options, ways


def _head_json(tables: Sequence[LayerTable], head: int, precision: str, setting: int) -> dict[str, Any]:
    """An entry of the file; `error` is the relative L2 of what skipping changes, PV skip included."""
    mine = [t.heads[head] for t in tables]
    tiles = sum(t.tiles for t in tables)
    qk = sum(t.tiles * m.qk[setting] for t, m in zip(tables, mine)) / tiles
    pv = sum(t.tiles * m.pv[setting] for t, m in zip(tables, mine)) / tiles
    error = math.sqrt(sum(m.error[setting] for m in mine) / max(sum(m.size for m in mine), 1e-300))
    measured = {"sparsity": 1 - qk, "work": (qk + pv) / 2, "error": error, "pv_error": error,
                "round_l1": sum(m.round_l1 for m in mine) / len(mine), "verified_on": len(mine)}  # fmt: skip
    one = SETTINGS[setting]
    sparse = one.floor is not None
    return {"head": head, "precision": precision, "select": "floor" if sparse else "all", "theta": -1.0,
            "tau": one.tau, "pv_skip": one.pv_skip if sparse else "off", "measured": measured}  # fmt: skip
