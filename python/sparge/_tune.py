"""sparge.tune: from a model, inputs and error bounds to a preset, in one call."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Union

from . import _core
from ._capture import Capture, CaptureWarning, _InMemory, Layers, _Recorder
from ._command import Bar
from ._presets import Preset

if TYPE_CHECKING:
    import torch

_SMALL_SHARE = 0.5  # of the free room: a recording that is expected to take less needs no word


def tune(
    model: torch.nn.Module | None,
    inputs: Iterable[Any] | None,
    target_l2: float | None = None,
    pv_l2: float | None = None,
    round_l1: float | None = None,
    out: Union[str, os.PathLike[str]] = "preset.json",
    *,
    target_l1: float | None = None,
    pv_l1: float | None = None,
    loss: float | None = None,
    captures: Union[str, os.PathLike[str], None] = None,
    seed: int = 0,
    layers: Layers = None,
    max_samples: int | None = None,
    restart: bool = False,
    threads: int | None = None,
    progress: bool = True,
    **recording: Any,
) -> Preset:
    """Finds the fastest parameters of each layer and head of `model` within error bounds, and writes them to `out`.

    The model runs on each of `inputs` (a mapping is passed as keyword arguments, a tuple as arguments, anything else as
    one argument) while its attention is recorded; then the library's tuner measures (docs/tuning.md). Interrupted, the
    same call continues: layers that are finished are kept in `out` + ".partial".

    target_l2   relative L2 per head that selecting tiles may cost; default 0.1
    pv_l2       the same with PV skip; default 1.2 target_l2
    target_l1, pv_l1   bounds of the relative L1 instead
    round_l1    relative L1 of 8-bit arithmetic beyond which a head takes 16 bits; default 0.05
    loss        instead of all these, for a causal language model of transformers: what the model as a whole may lose, as
                mean Kullback-Leibler divergence of its next token from that with exact attention, in nats per token.
                Spread over the heads where it harms least, and verified on an input that is held out
                (docs/python-tuning.md)
    captures    keep the recording in this folder. If it is there already, it is used as it is and the model does not
                run: model and inputs may then be None. Default: in memory
    seed        of sampled rows and held-out samples
    layers, max_samples, min_tokens, every, dtype   what is recorded: see sparge.capture
    restart     do not continue what an earlier call began
    threads     default all
    progress    show a bar, if tqdm is installed
    """
    out = Path(out)
    bounds = {"target_l2": target_l2, "pv_l2": pv_l2, "target_l1": target_l1, "pv_l1": pv_l1, "round_l1": round_l1}
    _check(bounds, out)
    if loss is not None:
        _check_loss(loss, {**bounds, "captures": captures, "max_samples": max_samples, "every": recording.get("every")})
    if threads is None and model is not None:
        import torch

        threads = torch.get_num_threads()
    if loss is not None:
        from ._loss import tune_loss

        return tune_loss(
            model, inputs, loss, out, seed=seed, layers=layers, restart=restart, threads=threads, progress=progress,
            **recording,
        )  # fmt: skip
    options = {"layers": layers, "max_samples": max_samples, **recording}
    with Bar("recording", _count(inputs), progress) as bar:
        if captures is None:
            recorded = _record_in_memory(model, inputs, options, bar)
        else:
            _record_once(model, inputs, Path(captures), options, bar)
            recorded = _core.Recording.read(os.fspath(captures))
        bar.restart("tuning")
        _core.tune(
            recorded, os.fspath(out), **bounds, seed=seed, restart=restart, threads=threads or 0, progress=bar.at
        )
        if recorded.assumed:
            warnings.warn(recorded.assumed, CaptureWarning, stacklevel=2)
        bar.finish()
    return Preset.read(out)


def _check(bounds: Mapping[str, float | None], out: Path) -> None:
    """Before the model runs, what the library would only refuse afterwards."""
    for name, value in bounds.items():
        if value is not None and not _core.TUNE_LEAST <= value <= 1:
            raise ValueError(f"{name}={value} is outside {_core.TUNE_LEAST:g}..1")
    if bounds["target_l1"] is not None and bounds["target_l2"] is not None:
        raise ValueError(f"target_l1={bounds['target_l1']} and target_l2={bounds['target_l2']} are two bounds: name one")
    for measure, default in (("l1", None), ("l2", _core.TUNE_TARGET_L2)):
        pv, target = bounds[f"pv_{measure}"], bounds[f"target_{measure}"]
        target = default if target is None else target
        if pv is not None and target is None:
            raise ValueError(f"pv_{measure}={pv} has no effect without target_{measure}")
        if pv is not None and target is not None and pv < target:
            raise ValueError(
                f"pv_{measure}={pv} is smaller than target_{measure}={target}: PV skip adds to the error of the selection"
            )
    if out.suffix != ".json":
        raise ValueError(f"out={str(out)!r} does not end in .json")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(2, "the folder of out does not exist", str(out))


def _check_loss(loss: float, others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}={value} has no effect with loss={loss}")


def _count(inputs: Iterable[Any] | None) -> int | None:
    try:
        return len(inputs)  # type: ignore[arg-type]
    except TypeError:
        return None


def _record_in_memory(
    model: torch.nn.Module | None, inputs: Iterable[Any] | None, options: Mapping[str, Any], bar: Bar
) -> _core.Recording:
    if model is None or inputs is None:
        raise ValueError("model and inputs are needed, or captures= with a recording")
    recorder = _InMemory(model, **options)
    _record(model, inputs, recorder, bar)
    return recorder.recording


def _record_once(
    model: torch.nn.Module | None, inputs: Iterable[Any] | None, folder: Path, options: Mapping[str, Any], bar: Bar
) -> None:
    """Fills `folder`, unless it is full: it gets its name when it is complete, so that it is never half a recording."""
    if folder.is_dir() and any(folder.iterdir()):
        if inputs is not None:
            warnings.warn(
                f"{folder} exists: its captures are used, and the model does not run; delete it to record anew",
                CaptureWarning,
                stacklevel=3,
            )
        return
    if model is None or inputs is None:
        raise ValueError(f"model and inputs are needed: there are no captures in captures={str(folder)!r}")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _record(model, inputs, Capture(model, unfinished, **options), bar)
        if folder.is_dir():
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _record(model: torch.nn.Module, inputs: Iterable[Any], recording: _Recorder, bar: Bar) -> None:
    import torch

    total = _count(inputs)
    with recording, torch.inference_mode():
        for number, value in enumerate(inputs, 1):
            if isinstance(value, Mapping):
                model(**value)
            elif isinstance(value, tuple):
                model(*value)
            else:
                model(value)
            bar.at(number)
            if recording.full:
                break
            if number == 1 and total is not None:
                _warn_of_size(recording, total - 1)
    if recording.files == 0:
        reasons = "; ".join(f"{layer}: {reason}" for layer, reason in list(recording.skipped.items())[:3])
        raise ValueError(f"nothing was captured of {type(model).__name__}" + (f" ({reasons})" if reasons else ""))


def _free_memory() -> int:
    """Bytes that a process may take without hurting others; what nobody knows is taken for much."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 1 << 62


def _warn_of_size(recording: _Recorder, passes: int) -> None:
    """After the first of several inputs of about the same size."""
    expected = recording.bytes * passes / recording.every
    if recording.max_samples is not None:
        expected = min(expected, recording.bytes * (recording.max_samples / max(recording.samples, 1) - 1))
    if isinstance(recording, Capture):
        free, where = shutil.disk_usage(recording.folder).free, f"in {recording.folder}"
        ways = "captures= puts it elsewhere"
    else:
        free, where, ways = _free_memory(), "of memory", "captures= puts it into files"
    if expected > _SMALL_SHARE * free or expected > recording.MANY_BYTES:
        warnings.warn(
            f"the recording will take about {expected / 1e9:.1f} GB more {where} ({free / 1e9:.1f} GB are free); "
            f"layers=, max_samples= and every= make it less, {ways}",
            CaptureWarning,
            stacklevel=5,
        )
