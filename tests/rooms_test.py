#!/usr/bin/env python3
"""Checks who includes whom, how long files are, and that the library is silent: rooms_test.py SOURCE_DIR"""

import re
import sys
import tempfile
from pathlib import Path

# The library's rooms from the lowest up: each may include itself and what stands before it. `device` is src/device.h, the
# table of functions that a device is.
ORDER = ("base", "problem", "select", "calibrate", "device", "cpu", "cuda", "layer", "tune", "api")
# Rooms with closed doors, and who may enter. The devices: all others know them as a table. The oracle: it judges.
CLOSED = {"cpu": ("cpu", "api"), "cuda": ("cuda", "api"), "reference": ("reference", "api")}
# The oracle stays apart from what it judges.
SEEN_BY_REFERENCE = ("base", "problem", "reference")
ROOMS = (*ORDER, "reference")
# Clients see the public headers and these folders.
CLIENTS = {"include": (), "io": ("io/",), "cli": ("cli/", "io/"), "python": ("python/src/", "io/"), "ggml": ("ggml/", "io/"),
           "distributed": ("distributed/", "sparge/sparge_mpi.h")}
PUBLIC = ("sparge/sparge.h", "sparge/sparge.hpp")
# Libraries: they neither print nor end the process.
QUIET = ("src", "distributed")
OURS = ("src/", "distributed/", "io/", "cli/", "python/", "ggml/", "include/", "sparge/", "tests/")

MAX_LINES = 500
MAX_LINES_KERNEL = 700
MAX_LINES_PUBLIC = 1000  # the contract stays in one file
# printf and friends (snprintf writes to memory and is fine), streams, and ways out of the process.
LOUD = re.compile(r"(?<![\w.])(?:v?f?printf|f?puts|abort|_?exit|quick_exit|terminate)\s*\(|std::(?:cout|cerr|clog)\b")
INCLUDE = re.compile(r'^\s*#\s*(?:include|define\s+HWY_TARGET_INCLUDE)\s*[<"]([^>"]+)[>"]', re.MULTILINE)
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def room_of(path):
    """The room of a file in src/: its folder, or the name of a file that is a room of its own (device.h, reference.cc)."""
    return path.split("/")[1].split(".")[0]


def may_include(path, target):
    folder = path.split("/")[0]
    if folder in CLIENTS:
        return target in PUBLIC or target.startswith(CLIENTS[folder])
    if target == "sparge/sparge.h":
        return True
    if not target.startswith("src/"):
        return False
    room, other = room_of(path), room_of(target)
    if room not in CLOSED.get(other, ROOMS):
        return False
    if room == "reference":
        return other in SEEN_BY_REFERENCE
    return other == "reference" or ORDER.index(other) <= ORDER.index(room)


def check_file(path, text):
    folder = path.split("/")[0]
    if folder == "src" and room_of(path) not in ROOMS:
        return [f"{path}: `{room_of(path)}` is no room; rooms are listed in tests/rooms_test.py"]
    faults = []
    lines = text.count("\n")
    limit = MAX_LINES_KERNEL if path.startswith("src/cpu/kernel/") else MAX_LINES
    if folder == "include":
        limit = MAX_LINES_PUBLIC
    if lines > limit:
        faults.append(f"{path}: {lines} lines, more than {limit}")
    for target in INCLUDE.findall(text):
        if not target.startswith(OURS):
            continue
        if target.startswith("src/") and room_of(target) not in ROOMS:
            faults.append(f"{path}: includes {target}, which is in no room")
        elif not may_include(path, target):
            faults.append(f"{path}: may not include {target}")
    if folder in QUIET:
        quiet = COMMENT_OR_TEXT.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
        for number, line in enumerate(quiet.split("\n"), 1):
            for found in LOUD.findall(line):
                faults.append(f"{path}:{number}: the library neither prints nor ends the process: {found.strip()}")
    return faults


def check_tree(root):
    faults, count = [], 0
    for folder in ("src", *CLIENTS):
        for file in sorted(root.glob(f"{folder}/**/*")):
            if file.suffix in (".h", ".cc", ".hpp", ".c", ".py", ".cu", ".cuh"):
                faults += check_file(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
                count += 1
    return faults, count


# Planted in an empty tree, each must be found, or be left alone: path, text, whether it is a fault.
PLANTED = (
    ("src/base/half.h", '#include "src/problem/problem.h"\n', True),
    ("src/problem/problem.h", '#include "src/select/select.h"\n', True),
    ("src/problem/problem.cc", '#include "src/cpu/kernel/kernel.h"\n', True),
    ("src/select/select.cc", '#include "src/calibrate/calibration.h"\n', True),
    ("src/select/select.cc", '#include "src/cpu/plan.h"\n', True),
    ("src/calibrate/calibration.cc", '#include "src/cpu/masses.h"\n', True),
    ("src/calibrate/calibration.cc", '#include "src/device.h"\n', True),
    ("src/device.h", '#include "src/cpu/device.h"\n', True),
    ("src/cpu/pack-inl.h", '#include "src/layer/layer.h"\n', True),
    ("src/cpu/attend.cc", '#include "src/reference.h"\n', True),
    ("src/layer/layer.cc", '#include "src/cpu/attend.h"\n', True),
    ("src/layer/layer.cc", '#include "src/tune/search.h"\n', True),
    ("src/tune/tuner.cc", '#include "src/cpu/device.h"\n', True),
    ("src/tune/tuner.cc", '#include "src/reference.h"\n', True),
    ("src/tune/tuner.cc", '#include "src/api/handles.h"\n', True),
    ("src/reference.cc", '#include "src/select/select.h"\n', True),
    ("src/reference.cc", '#include "src/device.h"\n', True),
    ("src/reference.cc", '#include "src/cpu/kernel/kernel.h"\n', True),
    ("src/cpu/attend.cc", '#define HWY_TARGET_INCLUDE "src/api/plan.cc"\n', True),
    ("src/api/plan.cc", '#include "io/npy.h"\n', True),
    ("src/api/plan.cc", "#include <sparge/sparge.hpp>\n", True),
    ("src/layer/layer.cc", '#include "src/cuda/device.h"\n', True),
    ("src/cuda/plan.cc", '#include "src/cpu/pack_ops.h"\n', True),
    ("src/cuda/kernel/rows.cuh", '#include "src/layer/layer.h"\n', True),
    ("src/api/plan.cc", '#include "src/rocm/device.h"\n', True),
    ("src/stray.cc", "", True),
    ("src/stray/stray.cc", "", True),
    ("include/sparge/sparge.h", '#include "src/base/half.h"\n', True),
    ("cli/main.cc", '#include "src/problem/problem.h"\n', True),
    ("io/npy.cc", '#include "cli/options.h"\n', True),
    ("ggml/mask.cc", '#include "src/problem/problem.h"\n', True),
    ("python/src/call.cc", '#include "cli/options.h"\n', True),
    ("src/api/plan.cc", '#include "distributed/group.h"\n', True),
    ("src/api/plan.cc", "#include <sparge/sparge_mpi.h>\n", True),
    ("cli/main.cc", "#include <sparge/sparge_mpi.h>\n", True),
    ("include/sparge/sparge.h", "#include <sparge/sparge_mpi.h>\n", True),
    ("distributed/ring.cc", '#include "src/base/half.h"\n', True),
    ("distributed/ring.cc", '#include "io/npy.h"\n', True),
    ("distributed/ring.cc", "void F() { std::abort(); }\n", True),
    ("src/api/plan.cc", "\n" * (MAX_LINES + 1), True),
    ("src/cpu/kernel/tile-inl.h", "\n" * (MAX_LINES_KERNEL + 1), True),
    ("src/api/plan.cc", 'void F() { std::printf("x"); }\n', True),
    ("src/api/plan.cc", "void F() { std::abort(); }\n", True),
    ("src/api/plan.cc", "void F() { std::cout << 1; }\n", True),
    ("src/problem/problem.cc", '#include "src/base/half.h"\n#include "src/problem/order.h"\n', False),
    ("src/device.h", '#include "src/calibrate/calibration.h"\n#include "src/select/select.h"\n', False),
    ("src/cpu/attend.cc", '#include "src/device.h"\n#include "src/select/select.h"\n#include "src/cpu/pack.h"\n', False),
    ("src/layer/layer.cc", '#include "src/device.h"\n#include "src/calibrate/calibration.h"\n', False),
    ("src/tune/tuner.cc", '#include "src/layer/layer.h"\n', False),
    ("src/api/context.cc", '#include "src/reference.h"\n#include "src/cpu/device.h"\n#include "src/tune/tuner.h"\n', False),
    ("src/reference.cc", '#include "src/reference.h"\n#include "src/base/half.h"\n#include "src/problem/problem.h"\n', False),
    ("src/api/plan.cc", 'void F(char* s) { std::snprintf(s, 1, "exit(1)"); }  // abort()\n', False),
    ("src/cpu/kernel/tile-inl.h", "\n" * MAX_LINES_KERNEL, False),
    ("include/sparge/sparge.hpp", "#include <sparge/sparge.h>\n#include <vector>\n", False),
    ("distributed/ring.cc", '#include <sparge/sparge_mpi.h>\n#include "distributed/group.h"\n#include <mpi.h>\n', False),
    ("cli/main.cc", '#include <sparge/sparge.hpp>\n#include "io/npy.h"\n#include <CLI/CLI.hpp>\n', False),
)


def self_test():
    for path, text, is_fault in PLANTED:
        with tempfile.TemporaryDirectory() as root:
            file = Path(root) / path
            file.parent.mkdir(parents=True)
            file.write_text(text, encoding="utf-8")
            faults, count = check_tree(Path(root))
        if count != 1 or bool(faults) != is_fault:
            sys.exit(f"this check is broken: {path} with {text[:60]!r} gave {faults}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    self_test()
    faults, count = check_tree(Path(sys.argv[1]))
    print("\n".join(faults) if faults else f"{count} files keep the rules")
    sys.exit(1 if faults or count == 0 else 0)


if __name__ == "__main__":
    main()
