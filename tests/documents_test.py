#!/usr/bin/env python3
"""Constants that the documents quote are those of the program and of the source: documents_test.py SPARGE FOLDER

A row of QUOTES is a document, a pattern with a group per number, and where the truth of each number is:
  info.NAME      `sparge info --json`; NAME may go into its `defaults`: info.defaults.tune.target_l2
  header.NAME    a macro of include/sparge/sparge.h
  source.NAME    a constant in the source: NAME = 12, once, or everywhere with the same value
  12, 0.5        a number that follows from others, given by a function of the other truths
A pattern must occur: a sentence that was written anew has a row to follow it. All its occurrences are compared.
"""
import json
import pathlib
import re
import subprocess
import sys

SOURCES = ("include", "src", "cli", "io", "ggml", "python/src", "python/sparge")
N = r"([\d.]+(?:e-?\d+)?)"  # a number
PERCENT = 100.0

CLI, TUNING, REPORT, ACCURACY = "docs/command-line.md", "docs/tuning.md", "docs/report.md", "docs/accuracy.md"
HEADER = "include/sparge/sparge.h"
TILE = ("header.SPARGE_BLOCK_Q", "header.SPARGE_BLOCK_K")
BOUNDS = ("info.defaults.target_l2", "info.defaults.pv_l2", "info.defaults.round_l1")
PARAMS = ("info.defaults.tau", "info.defaults.theta", "info.defaults.pv_skip")
TUNE = ("info.defaults.tune.target_l2", "info.defaults.tune.pv_l2", "info.defaults.tune.round_l1")

QUOTES = (
    # The error that is accepted.
    ("README.md", rf"relative L2 error within {N}, as measured", BOUNDS[:1]),
    ("README.md", rf"relative L2 error of {N} per head", BOUNDS[:1]),
    ("docs/parameters.md", rf"\(default {N}, and {N} once products are skipped\), and of the precision itself \(default\s+{N}:", BOUNDS),
    (CLI, rf"`--target-l2 X` \| {N} \| `auto`", BOUNDS[:1]),
    (CLI, rf"`--pv-l2 X` \| {N} times that", ("info.defaults.pv_room",)),
    (CLI, rf"`--round-l1 X` \| {N} \| `auto`", BOUNDS[2:]),
    (TUNING, rf"target_l2 {N}, pv_l2 {N}, round_l1 {N}", BOUNDS),
    (HEADER, rf"Defaults: target_l2 {N}, pv_l2 negative, round_l1 {N}, seed 0; target_l1 is not named\. \(", (BOUNDS[0], BOUNDS[2])),
    (HEADER, rf"Defaults: target_l2 {N}, pv_l2 negative, round_l1 {N}, seed 0; target_l1 is not named\. \*/", (TUNE[0], TUNE[2])),
    ("docs/ggml.md", rf"`SPARGE_TARGET_L2` \| {N} \|", BOUNDS[:1]),
    ("docs/diffusers.md", rf"`target_l2` \| {N} \|", BOUNDS[:1]),
    ("docs/python.md", rf"error of skipping within {N} per head", BOUNDS[:1]),
    # Parameters by hand.
    ("docs/cpp.md", rf"defaults: int8, select cdf, tau {N}, theta {N}, pv_skip {N}", PARAMS),
    ("docs/parameters.md", rf"`tau` \(0 to 1, default {N}\)", PARAMS[:1]),
    ("docs/parameters.md", rf"`theta` \(default {N}\)", PARAMS[1:2]),
    ("docs/parameters.md", rf"`pv_skip` \(default {N}, natural", PARAMS[2:]),
    (CLI, rf"`--tau X` \| {N} \|", PARAMS[:1]),
    (CLI, rf"`--theta X` \| {N} \|", PARAMS[1:2]),
    (CLI, rf"`--pv-skip X\\\|off` \| {N} \|", PARAMS[2:]),
    (CLI, rf"`--topk X` \| {N} \|", ("info.defaults.topk",)),
    (HEADER, rf"Defaults: int8, cdf, tau {N}, theta {N}, pv_skip {N}", PARAMS),
    ("docs/parity.md", rf"\| tau {N}, theta {N}, pv_skip {N} \(natural", PARAMS),
    # Sizes.
    ("README.md", rf"a tile is {N} queries by {N} keys", TILE),
    ("docs/cpp.md", rf"head sizes from 1 to {N} ", ("header.SPARGE_MAX_HEAD_DIM",)),
    (CLI, rf"in tiles of {N} queries x {N} keys", TILE),
    (REPORT, rf"one tile of {N} queries by {N} keys", TILE),
    ("docs/algorithm.md", rf"`SPARGE_BLOCK_Q` = {N} queries against a block of `SPARGE_BLOCK_K` = {N} keys", TILE),
    ("docs/parity.md", rf"\| {N} x {N} everywhere \|", TILE),
    ("docs/parity.md", rf"by `floor` and `auto` \({N} keys before each query\)", ("source.kNearKeys",)),
    ("docs/algorithm.md", rf"also keep the {N} keys\s+before each query", ("source.kNearKeys",)),
    ("docs/studies/predictor.md", rf"each tile \({N} queries x {N} keys\)", TILE),
    ("docs/ggml.md", rf"sizes up to {N}, values", ("header.SPARGE_MAX_HEAD_DIM",)),
    (HEADER, r"Head sizes 1\.\.(\d+)", ("header.SPARGE_MAX_HEAD_DIM",)),
    ("docs/numerics.md", rf"as much as {N} queries take to use it unpacked", ("source.kDirectQueries",)),
    (HEADER, rf"at least: up to {N} queries per kv head", ("source.kDirectQueries",)),
    ("docs/ggml.md", rf"with at least {N} queries: prompts", (lambda truth: truth("header.SPARGE_FEW_QUERIES") + 1,)),
    (CLI, rf"fewer than {N} keys or at most {N} queries skip\s+nothing, and the last {N} queries",
     ("info.defaults.min_keys", "header.SPARGE_FEW_QUERIES", "info.defaults.dense_tail")),
    (CLI, rf"has a choice, at most {N} times", ("source.kMostCalls",)),
    (HEADER, rf"min_keys; +/\* {N} \*/", ("info.defaults.min_keys",)),
    (HEADER, rf"int64_t dense_tail; +/\* {N} \*/", ("info.defaults.dense_tail",)),
    ("docs/ggml.md", rf"`SPARGE_MIN_TOKENS` \| {N} \|", ("info.defaults.min_keys",)),
    ("docs/ggml.md", rf"the last {N} queries of a batch", ("info.defaults.dense_tail",)),
    ("docs/python.md", rf"the last {N} queries", ("info.defaults.dense_tail",)),
    ("docs/ggml.md", rf"as much as {N} of\s+its keys", ("source.kSampledKeys",)),
    ("docs/layers.md", rf"as {N} keys of a dense call", ("source.kSampledKeys",)),
    ("docs/layers.md", rf"memory for {N} tokens at first", ("source.kFirstRoom",)),
    # Tuning and checking.
    (CLI, rf"`--target-l2 X` \| {N} \| relative", TUNE[:1]),
    (CLI, rf"`--pv-l2 X` \| {N} times `--target-l2`", (lambda truth: truth(TUNE[1]) / truth(TUNE[0]),)),
    (CLI, rf"`--round-l1 X` \| {N} \| relative", TUNE[2:]),
    (CLI, rf"at least {N} % of the heads must be within {N} times", (lambda t: PERCENT * t("source.kShareWithin"), "header.SPARGE_SINGLE_CALL")),
    (TUNING, rf"fewer than {N} % of the heads are within {N} times", (lambda t: PERCENT * t("source.kShareWithin"), "header.SPARGE_SINGLE_CALL")),
    (TUNING, rf"no sample is beyond {N} times the bound", ("source.kLargestSample",)),
    (TUNING, rf"mean \+ {N} standard deviations are within {N} times", ("source.kOneInTwenty", "header.SPARGE_SINGLE_CALL")),
    (TUNING, rf"through {N} values of tau", ("source.kTaus",)),
    (TUNING, rf"infinity down through {N} values", ("source.kSkips",)),
    (TUNING, rf"beyond {N} rows older ones fade", ("source.kWindow",)),
    (TUNING, rf"more than {N} times the error that is allowed", ("source.kAlarm",)),
    (TUNING, rf"of which fewer than {N} rows are known", ("source.kFewest",)),
    (TUNING, rf"of which {N} rows are known gets half", ("source.kSettled",)),
    (TUNING, rf"nothing saves {N} % is dense", (lambda t: PERCENT * t("source.kWorthwhile"),)),
    (TUNING, rf"at least {N} rows leave something out", ("source.kFewestSkipping",)),
    (ACCURACY, rf"within {N} times of the true one", ("header.SPARGE_KNOWN_WITHIN",)),
    (TUNING, rf"first choice, then {N} %", (lambda t: PERCENT * t("source.kWatchEffort"),)),
    (ACCURACY, rf"`target_l2` \(default {N}\)", ("source.kTargetL2",)),
    (ACCURACY, rf"{N} rows are needed", ("source.kFewest",)),
    (ACCURACY, rf"is more than {N} times the median", ("source.kRatio",)),
    (ACCURACY, rf"with more than {N} different ones", ("source.kMostUnlike",)),
    # Reports and benchmarks.
    (REPORT, rf"at most {N} heads", ("source.kMostPictured",)),
    (REPORT, rf"the {N} with the largest\s+relative L1, and {N} spread", ("source.kWorstPictured",
                                                                       lambda t: t("source.kMostPictured") - t("source.kWorstPictured"))),
    (REPORT, rf"scale from {N} to 1\.", ("source.kLeastMass",)),
    (REPORT, rf"although the tile holds {N} % or more", (lambda t: PERCENT * t("source.kMissedMass"),)),
    (REPORT, rf"With more than {N} tiles along a side", ("source.kMostPixels",)),
    (CLI, rf"\| {N}, {N}, {N} \| of `random`, `cdf`, `topk`", ("source.kDefaultKeep", PARAMS[0], "info.defaults.topk")),
    (CLI, rf"\| {N} for `cdf` and `topk`, else off \| at least {N},", (PARAMS[2], "source.kLeastPvSkip")),
    (CLI, rf"as many as take X seconds, {N} to {N} \|", ("source.kFewestRounds", "source.kMostRounds")),
    (CLI, r"tolerances-in-the-tests\): " + f"{N}, {N}, {N}" + r"\)", ("source.kBoundFp32", "source.kBoundInt16", "source.kBoundInt8")),
    (CLI, rf"plus\s+{N} e\^-X for", ("source.kSkippedKeys",)),
    (CLI, rf"no row worse than {N} times that", ("source.kRowFactor",)),
    (CLI, rf"a case below {N} ms runs once untimed", ("source.kShortMs",)),
    # Versions.
    ("docs/cpp.md", rf"find_package\(sparge {N} REQUIRED", (lambda t: t("header.SPARGE_VERSION_MAJOR") + t("header.SPARGE_VERSION_MINOR") / 10,)),
    ("python/compat/pyproject.toml", rf'version = "{N}\.[0-9]+"', (lambda t: t("header.SPARGE_VERSION_MAJOR") + t("header.SPARGE_VERSION_MINOR") / 10,)),
)


class Truths:
    def __init__(self, program, root):
        self.info = json.loads(subprocess.run([program, "info", "--json"], capture_output=True, check=True, text=True).stdout)
        self.header = (root / HEADER).read_text("utf-8")
        files = (f for folder in SOURCES for f in sorted((root / folder).rglob("*")) if f.suffix in (".h", ".cc", ".py"))
        self.source = "\n".join(f.read_text("utf-8") for f in files)

    def __call__(self, name):
        if callable(name):
            return name(self)
        kind, rest = name.split(".", 1)
        if kind == "info":
            value = self.info
            for part in rest.split("."):
                value = value[part]
            return float(value)
        pattern = rf"#define {rest} {N}" if kind == "header" else rf"\b{rest} = {N}"
        found = {float(x) for x in re.findall(pattern, self.header if kind == "header" else self.source)}
        if len(found) != 1:
            raise LookupError(f"{name}: {'is not there' if not found else f'has several values: {sorted(found)}'}")
        return found.pop()


def compare(document, text, pattern, names, truths):
    """What is wrong with a row, or nothing."""
    try:
        wanted = tuple(truths(name) for name in names)
    except LookupError as error:
        return [f"{document}: {error}"]
    found = [x if isinstance(x, tuple) else (x,) for x in re.findall(pattern, text)]
    if not found:
        return [f"{document}: does not say any more: {pattern}"]
    return [f"{document}: says {', '.join(said)}, but it is {', '.join(f'{w:g}' for w in wanted)}: {pattern}"
            for said in found if len(said) != len(wanted) or any(differ(s, w) for s, w in zip(said, wanted))]


def differ(said, wanted):
    return abs(float(said.rstrip(".")) - wanted) > 1e-9 * abs(wanted)


# Documents that name things in the source, and where to look for them.
TOURS = ("HACKING.md", "CONTRIBUTING.md", "docs/algorithm.md", "docs/layout.md", "docs/numerics.md", "docs/tuning.md")
# Names of others, made-up ones, and what is made later.
NOT_OURS = ("CamelCase", "kName", "-inl.h", "ggml-backend-impl.h", "python/sparge/bin/", "sparge_calibration_", "sparge_tuner_")
TREE = ("include", "src", "distributed", "io", "cli", "ggml", "python", "tests", "bench", "scripts", "docs", "tools", "cmake", "data", "build")
NAME = re.compile(r"(?:[A-Za-z_]\w*::)?(k[A-Z]\w*|[A-Z][a-z]+[A-Z]\w*|SPARGE_\w+|HWY_\w+|sparge_\w+)")
FILE = re.compile(r"[\w./*+-]+\.(?:h|hpp|cc|c|py|sh|md|json|in|txt|cmake)")


def absent_names(text, root):
    """Identifiers, files and folders in `code` of the text that are not in the tree."""
    files = {f for folder in TREE for f in (root / folder).rglob("*")
             if f.is_file() and "build" not in f.relative_to(root).parts[:1]}
    names = {f.name for f in files}
    words = set()
    for file in files:
        if file.suffix in (".h", ".hpp", ".cc", ".c", ".py", ".in", ".cmake"):
            words.update(re.findall(r"\w+", file.read_text("utf-8", "replace")))
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    absent = []
    for code in re.findall(r"`([^`\n]+)`", prose):
        if code in NOT_OURS:
            continue
        identifier = NAME.fullmatch(code)
        if identifier and identifier[1] not in words:
            absent.append(code)
        elif FILE.fullmatch(code) and "build/" not in code:
            found = any(root.glob(code)) or any(pathlib.PurePath(name).match(code) for name in names)
            if not found and not any(f.as_posix().endswith("/" + code) for f in files):
                absent.append(code)
        elif re.fullmatch(r"[\w./-]+/", code) and not (root / code).is_dir() and "build/" not in code:
            if not any((root / folder / code).is_dir() for folder in ("src/cpu", "python", "python/sparge")):
                absent.append(code)
    return absent


def self_test(truths, root):
    """A document that drifts is found, and so are rows that look at nothing."""
    row = (rf"within {N} of", BOUNDS[:1])
    right = "within %g of" % truths(BOUNDS[0])
    assert compare("d", right, *row, truths) == []
    assert len(compare("d", right + ", within 0.5 of", *row, truths)) == 1
    assert len(compare("d", "about 0.015", *row, truths)) == 1
    assert len(compare("d", right, row[0], ("source.kNo" + "SuchName",), truths)) == 1
    gone = "`kNo" + "SuchName`, `src/no_such_file.h`, `no_such_file.cc`, `src/nowhere/`"
    assert len(absent_names("`kBlockQ` in `src/base/units.h`, `units.h`, `src/base/`, " + gone, root)) == 4


def main():
    program, root = str(pathlib.Path(sys.argv[1]).resolve()), pathlib.Path(sys.argv[2])
    truths = Truths(program, root)
    self_test(truths, root)
    faults = [f"{tour}: `{name}` does not exist" for tour in TOURS
              for name in absent_names((root / tour).read_text("utf-8"), root)]
    faults += [fault for document, pattern, names in QUOTES
              for fault in compare(document, (root / document).read_text("utf-8"), pattern, names, truths)]
    print("\n".join(faults) or f"{len(QUOTES)} quotations agree with program and source")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
