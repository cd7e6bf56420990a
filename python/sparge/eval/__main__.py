"""The command line: one verb per question."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable

from .. import _core
from . import _answer, _denoise, _facts, _needle, _perplexity, _prefill
from ._common import Failed, write_json

_VERBS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "perplexity": (_perplexity.add_arguments, _perplexity.run),
    "needle": (_needle.add_arguments, _needle.run),
    "facts": (_facts.add_arguments, _facts.run),
    "prefill": (_prefill.add_arguments, _prefill.run),
    "answer": (_answer.add_arguments, _answer.run),
    "denoise": (_denoise.add_arguments, _denoise.run),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparge.eval", description=__import__("sparge.eval").eval.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (add_arguments, run) in _VERBS.items():
        summary = (sys.modules[run.__module__].__doc__ or "").splitlines()[0]
        verb = verbs.add_parser(name, help=summary, description=summary)
        add_arguments(verb)
        verb.add_argument("--threads", type=int, default=0, help="default: as many as PyTorch takes")
        text = f"relative L2 error per head that skipping may cause; default {_core.TARGET_L2:g}"
        verb.add_argument("--target-l2", type=float, help=text)
        verb.add_argument("--target-l1", type=float, help="a bound of the relative L1 error instead")
        verb.add_argument("--precision", choices=("int8", "int16", "fp32"), help="default int8")
        verb.add_argument("--preset", help="of `sparge tune`, instead of calibrations")
        verb.add_argument("--json", metavar="FILE", help="the figures, to a file or, with -, to stdout")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.json not in (None, "-"):  # before minutes of work, not after
            with open(options.json, "a", encoding="utf-8"):
                pass
        figures = _VERBS[options.verb][1](options)
    except (Failed, ValueError, OSError) as error:
        print(f"sparge.eval: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if options.json:
        write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
