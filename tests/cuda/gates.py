#!/usr/bin/env python3
"""Gates on the machine code of the GPU kernels: gates.py IMAGES [--update] [--nvdisasm PROGRAM]

IMAGES is the folder in which the build left NAME.fatbin and NAME.log (ptxas -v) of every kernel file. Checked:
- no kernel whose loop takes time spills a register or has a stack, on no architecture; others have a few bytes where they
  call what divides;
- registers, shared memory, blocks per multiprocessor and bytes of stack are those of resources.txt beside this script, which changes
  only on purpose (--update writes it);
- tensor-core instructions of the attention kernels are as many as the tiles need, in the PTX and, if nvdisasm is there,
  in the machine code.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TABLE = Path(__file__).with_name("resources.txt")
FILES = ("attend", "merge", "pack_keys", "pack_queries", "score", "select")
LOOPS = ("sparge_attend", "sparge_score")
THREADS = 128  # packing has one per channel
# Per multiprocessor: shared memory in KB that blocks may take, by architecture; registers are 65536 everywhere.
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# What every block takes beside its own.
RESERVED = 1024


def launched_shared(kernel):
    """Bytes that a launch asks for: queries and two steps, or the rows of a pool (src/cuda/kernel/params.h)."""
    if kernel == "sparge_pack_queries_256":
        return (64 + 2 + 8) * 256 * 4
    found = re.fullmatch(r"sparge_attend_(\d+)_(f16|fp8)", kernel)
    if not found:
        return 0
    dim, fp8 = int(found[1]), found[2] == "fp8"
    keys = 64 if dim == 64 else 32
    step = keys * dim + keys * min(dim, 128) * (1 if fp8 else 2) + keys * 4
    return 128 * dim + 128 * 4 + 2 * step


def threads_of(kernel):
    return 256 if re.match(r"sparge_(survey|units|pack_keys|pack_queries)_256", kernel) else THREADS


def read_log(text):
    """(architecture, kernel) -> registers, shared bytes, spilled bytes, stack bytes."""
    found, key = {}, None
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for 'sm_(\d+)\w*'", line):
            key = (int(match[2]), match[1])
            found[key] = {"shared": 0}
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            found[key]["stack"], found[key]["spill"] = int(match[1]), int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            found[key]["registers"] = int(match[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                found[key]["shared"] = int(shared[1])
    return found


def blocks_per_multiprocessor(architecture, registers, shared, threads):
    # Registers are given to warps in steps of 256.
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // per_warp // (threads // 32)
    by_shared = SHARED_KB[architecture] * 1024 // (shared + RESERVED)
    return min(by_registers, by_shared)


def expected_products(kernel):
    """Tensor-core instructions of an attention kernel: each operand is multiplied in one place of its text."""
    dim, fp8 = int(kernel.split("_")[2]), kernel.endswith("fp8")
    keys = 64 if dim == 64 else 32
    row_tiles = 2
    return {"qk": row_tiles * (keys // 8) * (dim // 32),
            "pv": row_tiles * (keys // 32 if fp8 else keys // 16) * (min(dim, 128) // 8)}


def machine_code(fatbin, nvdisasm):
    """(architecture, kernel) -> text; cubins are ELF files one behind the other once cuobjdump has taken them out."""
    with tempfile.TemporaryDirectory() as folder:
        cuobjdump = Path(nvdisasm).with_name("cuobjdump")
        subprocess.run([cuobjdump, "-xelf", "all", fatbin.resolve()], cwd=folder, check=True, capture_output=True)
        texts = {}
        for cubin in sorted(Path(folder).glob("*.cubin")):
            architecture = int(re.search(r"sm_(\d+)", cubin.name)[1])
            text = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
            for part in re.split(r"\.section\s+\.text\.", text)[1:]:
                texts[architecture, part.split(",")[0].strip()] = part
        return texts


def check_products(images, nvdisasm):
    faults = []
    for (architecture, kernel), text in machine_code(images / "attend.fatbin", nvdisasm).items():
        want = expected_products(kernel)
        got = {"qk": len(re.findall(r"\bIMMA\.16832", text)),
               "pv": len(re.findall(r"\bQMMA\.16832" if kernel.endswith("fp8") else r"\bHMMA\.16816", text))}
        if got != want:
            faults.append(f"sm_{architecture} {kernel}: tensor-core instructions are {got}, not {want}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--nvdisasm", help="with cuobjdump beside it")
    args = parser.parse_args()
    faults, lines = [], []
    for name in FILES:
        found = read_log((args.images / f"{name}.log").read_text())
        if not found:
            faults.append(f"{name}.log says nothing of any kernel")
        for (architecture, kernel), use in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
            if (use["spill"] or use["stack"]) and kernel.startswith(LOOPS):
                faults.append(f"sm_{architecture} {kernel}: {use['spill']} bytes are spilled, the stack has {use['stack']}")
            shared = use["shared"] + launched_shared(kernel)
            blocks = blocks_per_multiprocessor(architecture, use["registers"], shared, threads_of(kernel))
            lines.append(f"{kernel:<28} sm_{architecture:<4} {use['registers']:>9} {shared:>6} {blocks:>6} {use['stack']:>5}")
    text = f"{'# kernel':<28} {'':<7} {'registers':>9} {'shared':>6} {'blocks':>6} {'stack':>5}\n" + "\n".join(lines) + "\n"
    if args.update:
        TABLE.write_text(text)
    elif TABLE.read_text() != text:
        old = TABLE.read_text().splitlines()
        faults += [f"not in resources.txt: {line}" for line in text.splitlines() if line not in old]
        faults += [f"only in resources.txt: {line}" for line in old if line not in text.splitlines()]
    if args.nvdisasm:
        faults += check_products(args.images, args.nvdisasm)
    print("\n".join(faults) if faults else f"{len(lines)} kernels keep the gates"
          + ("" if args.nvdisasm else "; tensor-core instructions were not counted (no nvdisasm)"))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
