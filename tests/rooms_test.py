#!/usr/bin/env python3
"""Checks who includes whom, how long files are, and that the library is silent: rooms_test.py SOURCE_DIR"""

import re
import sys
import tempfile
from pathlib import Path

# The library's rooms from the lowest up: each may include itself and what stands before it.
ORDER = ("base", "problem", "select", "calibrate", "cpu", "layer", "tune", "api")
# The oracle stays apart from what it judges.
REFERENCE = ("src/base/", "src/problem/", "src/reference")
# Clients see the public headers and these folders.
CLIENTS = {"io": ("io/",), "cli": ("cli/", "io/"), "python": ("python/src/",), "ggml": ("ggml/", "io/")}
PUBLIC = ("sparge/sparge.h", "sparge/sparge.hpp")
OURS = ("src/", "io/", "cli/", "python/", "ggml/", "include/", "sparge/", "tests/")

MAX_LINES = 500
MAX_LINES_KERNEL = 700
# printf and friends (snprintf writes to memory and is fine), streams, and ways out of the process.
LOUD = re.compile(r"(?<![\w.])(?:v?f?printf|f?puts|abort|_?exit|quick_exit|terminate)\s*\(|std::(?:cout|cerr|clog)\b")
INCLUDE = re.compile(r'^\s*#\s*(?:include|define\s+HWY_TARGET_INCLUDE)\s*[<"]([^>"]+)[>"]', re.MULTILINE)
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def room_of(path):
    """The room of a file in src/: its folder, or what its name begins with (pack_ops.cc and pack-inl.h are pack)."""
    parts = path.split("/")[1:]
    name = parts[0] if len(parts) > 1 else re.split(r"[-_.]", parts[0])[0]
    return MEMBERS.get(name, name)


def may_include(path, target):
    folder = path.split("/")[0]
    if folder in CLIENTS:
        return target in PUBLIC or target.startswith(CLIENTS[folder])
    if target == "sparge/sparge.h":
        return True
    room = room_of(path)
    if room == "reference":
        return target.startswith(REFERENCE)
    if not target.startswith("src/"):
        return False
    if room_of(target) == "reference":
        return room == "api"
    return ORDER.index(room_of(target)) <= ORDER.index(room)


def check_file(path, text):
    folder = path.split("/")[0]
    if folder == "src" and room_of(path) not in ORDER + ("reference",):
        return [f"{path}: `{room_of(path)}` is no room; rooms are listed in tests/rooms_test.py"]
    faults = []
    lines = text.count("\n")
    limit = MAX_LINES_KERNEL if path.startswith("src/kernel/") else MAX_LINES
    if lines > limit:
        faults.append(f"{path}: {lines} lines, more than {limit}")
    for target in INCLUDE.findall(text):
        if not target.startswith(OURS):
            continue
        if target.startswith("src/") and room_of(target) not in ORDER + ("reference",):
            faults.append(f"{path}: includes {target}, which is in no room")
        elif not may_include(path, target):
            faults.append(f"{path}: may not include {target}")
    if folder == "src":
        quiet = COMMENT_OR_TEXT.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
        for number, line in enumerate(quiet.split("\n"), 1):
            for found in LOUD.findall(line):
                faults.append(f"{path}:{number}: the library neither prints nor ends the process: {found.strip()}")
    return faults


def check_tree(root):
    faults, count = [], 0
    for folder in ("src", *CLIENTS):
        for file in sorted(root.glob(f"{folder}/**/*")):
            if file.suffix in (".h", ".cc", ".hpp", ".c", ".py"):
                faults += check_file(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
                count += 1
    return faults, count


# Planted in an empty tree, each must be found, or be left alone: path, text, whether it is a fault.
PLANTED = (
    ("src/base/half.h", '#include "src/plan.h"\n', True),
    ("src/pack-inl.h", '#include "src/predict.h"\n', True),
    ("src/permute.cc", '#include "src/plan.h"\n', True),
    ("src/attend.cc", '#include "src/reference.h"\n', True),
    ("src/reference.cc", '#include "src/kernel/tile-inl.h"\n', True),
    ("src/reference.cc", '#include "src/pack.h"\n', True),
    ("src/plan.cc", '#include "io/npy.h"\n', True),
    ("src/plan.cc", "#include <sparge/sparge.hpp>\n", True),
    ("src/stray.cc", "", True),
    ("cli/main.cc", '#include "src/plan.h"\n', True),
    ("io/npy.cc", '#include "cli/options.h"\n', True),
    ("ggml/mask.cc", '#include "src/plan.h"\n', True),
    ("src/plan.cc", "\n" * (MAX_LINES + 1), True),
    ("src/kernel/tile-inl.h", "\n" * (MAX_LINES_KERNEL + 1), True),
    ("src/plan.cc", 'void F() { std::printf("x"); }\n', True),
    ("src/plan.cc", "void F() { std::abort(); }\n", True),
    ("src/plan.cc", "void F() { std::cout << 1; }\n", True),
    ("src/plan.cc", '#include "src/permute.h"\n', False),
    ("src/api.cc", '#include "src/reference.h"\n#include "src/attend.h"\n', False),
    ("src/reference.cc", '#include "src/plan.h"\n#include "src/kernel/kernel.h"\n', False),
    ("src/plan.cc", 'void F(char* s) { std::snprintf(s, 1, "exit(1)"); }  // abort()\n', False),
    ("src/kernel/tile-inl.h", "\n" * MAX_LINES_KERNEL, False),
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
