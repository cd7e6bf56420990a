#!/usr/bin/env python3
"""Counts the instructions of small cases under valgrind and compares them with bench/instructions.json.

Times on a shared machine move by more than a slip in a loop costs; instruction counts do not move at all. Counted is
what happens inside `sparge_run`, on one thread, with the instruction set avx2 (valgrind knows no AVX-512).

Exit code 0: no case grew, or counts of this compiler cannot be compared with the table. 1: a case grew by more than
3 %, or has no entry. 2: could not count.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

TABLE = pathlib.Path(__file__).with_suffix(".json")
# Counts of one build repeat to a few hundred instructions, so this is not for noise: it is what a change may cost
# without having to say so.
LIMIT = 0.03

CASES = {
    "fp32, 64": "--tokens 1024 --dim 64 --precision fp32",
    "int16, 64": "--tokens 1024 --dim 64 --precision int16",
    "int8, 64": "--tokens 1024 --dim 64 --precision int8",
    "fp32, 128": "--tokens 512 --dim 128 --precision fp32",
    "int16, 128": "--tokens 512 --dim 128 --precision int16",
    "int8, 128": "--tokens 1024 --dim 128 --precision int8",
    "int8, 80": "--tokens 512 --dim 80 --precision int8",
    "int8, 64, causal": "--tokens 1024 --dim 64 --precision int8 --causal",
    "fp32, 64, causal": "--tokens 1024 --dim 64 --precision fp32 --causal",
    "int8, 64, fp16 tensors": "--tokens 1024 --dim 64 --precision int8 --dtype fp16",
    "int8, 128, 10 % of tiles": "--tokens 1024 --dim 128 --precision int8 --select random --keep 0.1",
    "int8, 64, cdf": "--tokens 1024 --dim 64 --precision int8 --select cdf --tau 0.98",
    "int8, 128, 1 query": "--tokens 1024 --dim 128 --precision int8 --queries 1",
    "fp32, 128, 1 query": "--tokens 1024 --dim 128 --precision fp32 --queries 1",
}


class CannotCount(Exception):
    """One line: what is missing."""


# ------------------------------------------------------------------ comparison


def compare(before, now, limit=LIMIT):
    """Rows (name, count before or None, count now or None, note) in the order of `now`, and whether all is well."""
    rows, well = [], True
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            note, well = ("no entry: please --update" if old is None else "no such case: please --update"), False
        elif new > old * (1 + limit):
            note, well = f"GREW by more than {limit:.0%}", False
        elif new < old * (1 - limit):
            note = "better: please --update"
        else:
            note = ""
        rows.append((name, old, new, note))
    return rows, well


def table_text(rows):
    def number(count):
        return "-" if count is None else f"{count:,}".replace(",", " ")

    lines = [f"{'instructions in sparge_run':<27} {'before':>13} {'now':>13} {'change':>8}"]
    for name, old, new, note in rows:
        change = "-" if not old or new is None else f"{(new - old) / old:+.2%}"
        lines.append(f"{name:<27} {number(old):>13} {number(new):>13} {change:>8}  {note}".rstrip())
    return "\n".join(lines)


def toolchain_difference(recorded, here):
    """What makes counts of here differ from the recorded ones for no fault of the code; empty if nothing."""
    return ", ".join(f"{key}: recorded {recorded.get(key)!r}, here {here.get(key)!r}"
                     for key in sorted({*recorded, *here}) if recorded.get(key) != here.get(key))


# ------------------------------------------------------------------ counting


def output_of(*command, **more):
    try:
        done = subprocess.run(command, capture_output=True, text=True, **more)
    except OSError as error:
        raise CannotCount(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise CannotCount(f"{' '.join(map(str, command))}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return done


def toolchain(build):
    """What the counts depend on besides the code: compiler, kind of build, Highway (most of the kernels' source)."""
    cache = build / "CMakeCache.txt"
    if not cache.is_file():
        raise CannotCount(f"{build} is not a build folder; give one with --build")
    settings = dict(re.findall(r"^(CMAKE_CXX_COMPILER|CMAKE_BUILD_TYPE):\w+=(.*)$", cache.read_text(), re.MULTILINE))
    compiler = output_of(settings["CMAKE_CXX_COMPILER"], "--version").stdout.splitlines()[0]
    return {"compiler": re.sub(r"^\S*[cg]\+\+\S* ", "g++ ", compiler),  # it names itself as it was called
            "build": settings["CMAKE_BUILD_TYPE"],
            "highway": output_of("pkg-config", "--modversion", "libhwy").stdout.strip()}


def count(sparge, flags):
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=sparge_run", sparge,
               "bench", "--heads", "1", *flags.split(), "--threads", "1", "--once"]
    done = output_of(*command, env={**os.environ, "SPARGE_ISA": "avx2"})
    found = re.search(r"Collected : (\d+)", done.stderr)
    if not found or found.group(1) == "0":
        raise CannotCount(f"valgrind counted nothing in: {' '.join(map(str, command))}")
    return int(found.group(1))


def count_all(sparge, jobs):
    names = list(CASES)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return dict(zip(names, pool.map(lambda name: count(sparge, CASES[name]), names)))


def has_avx2(sparge):
    isas = json.loads(output_of(sparge, "info", "--json", env={**os.environ, "SPARGE_ISA": ""}).stdout)["isas"]
    return any(isa["name"] == "avx2" and isa["runnable"] for isa in isas)


def run(arguments):
    sparge = arguments.build / "cli" / "sparge"
    here = toolchain(arguments.build)
    if not has_avx2(sparge):
        print("not comparable: this machine has no AVX2")
        return 0
    recorded = json.loads(TABLE.read_text()) if TABLE.is_file() else {"toolchain": {}, "instructions": {}}
    now = count_all(sparge, arguments.jobs)
    rows, well = compare(recorded["instructions"], now)
    print(table_text(rows))
    if arguments.update:
        TABLE.write_text(json.dumps({"toolchain": here, "instructions": now}, indent=2) + "\n")
        print(f"wrote {TABLE}")
        return 0
    difference = toolchain_difference(recorded["toolchain"], here)
    if difference:
        print(f"not comparable: {difference}")
        return 0
    return 0 if well else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--build", type=pathlib.Path, default=root / "build" / "test", metavar="DIR",
                        help="folder of a Release build; default build/test")
    parser.add_argument("--update", action="store_true", help="write the counts into the table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="cases at once; default all")
    try:
        sys.exit(run(parser.parse_args()))
    except CannotCount as error:
        print(f"instructions.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
