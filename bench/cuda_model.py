#!/usr/bin/env python3
"""Static issue model of the GPU's attention kernels: what their machine code would take if nothing but its pipes did.

    bench/cuda_model.py build/cuda/src/cuda --nvdisasm PROGRAM    # with cuobjdump beside it (toolkit, or PyPI's packages
                                                                  # nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump)

A PROJECTION: nothing here was measured on a GPU, and none of its figures may be published as a speed. It ranks variants
that differ by more than 20 %, and says which pipe limits them.

Counted are the instructions of one pass through a kernel's main loop, on the shortest way that has all of its tensor-core
instructions: a step without mask, softcap and growing maxima. Loops inside (copies) count once. A quarter of a
multiprocessor has one warp of each block of four, that is 32 of 128 query rows. The time of a tile of 128 x 64 is at least
that of the busiest pipe ("all overlaps"); where tensor cores alternate with all else, it is their time and that of the
busiest other pipe ("they alternate"). Not seen: latencies, memory, the ends of rows, prediction.
"""

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/cuda"))
from gates import machine_code

QUARTERS = 4
TILE_KEYS, WARP_ROWS = 64, 32
CHANNELS_AT_ONCE = 128  # of the output; those of larger heads are shared among blocks that all compute the scores
# Multiply-adds x 2 of one instruction of a warp, from its shape.
TENSOR_OPS = {"IMMA": 2 * 16 * 8 * 32, "HMMA": 2 * 16 * 8 * 16, "QMMA": 2 * 16 * 8 * 32}
# By mma.sync an H100 reaches this share of its peak, which is that of wgmma (arXiv 2501.12084: 62.9 % on average).
MMA_SYNC_SHARE_H100 = 0.629


@dataclass(frozen=True)
class Gpu:
    """Data sheet: dense peaks in 10^12 operations per second; f16 and e4m3 with sums in fp32."""

    name: str
    architecture: int
    multiprocessors: int
    ghz: float
    peaks: dict  # by instruction; a missing one is not there, or is computed by another
    fp32_lanes: int  # results per clock and quarter (CUDA C++ Programming Guide, throughput of arithmetic instructions)
    share: float = 1.0  # of the peaks that mma.sync reaches


GPUS = (
    Gpu("A100", 80, 108, 1.41, {"IMMA": 624, "HMMA": 312}, 16),
    Gpu("RTX 3090", 86, 82, 1.695, {"IMMA": 284, "HMMA": 71}, 32),
    Gpu("RTX 4090", 89, 128, 2.52, {"IMMA": 660.6, "HMMA": 165.2, "QMMA": 330.3}, 32),
    Gpu("L40S", 89, 142, 2.52, {"IMMA": 733, "HMMA": 362, "QMMA": 733}, 32),
    Gpu("H100 SXM", 90, 132, 1.83, {"IMMA": 1979, "HMMA": 989}, 32, MMA_SYNC_SHARE_H100),
    Gpu("RTX 5090", 120, 170, 2.41, {"IMMA": 838, "HMMA": 209.5, "QMMA": 419}, 32),
)
# sm_100: no rate of mma.sync is published, so there is nothing to project with.

# What others published for dense attention of heads of 128, or said they reach (10^12 operations per second).
SAGE = {"A100": 278, "H100 SXM": 518, "RTX 4090": 431}  # SageAttention, its repository's charts
# SpargeAttn (arXiv 2502.18137), table 1, on RTX 4090 and L40; dense-equivalent: operations that were skipped count.
PAPER = (708, 508, 582)

# Lanes per clock and quarter of the other pipes, by the same table: 64, 16, 32 results per clock and multiprocessor.
ALU_LANES, IMAD_LANES, MUFU_LANES, SHUFFLE_LANES = 16, 16, 4, 8
SHARED_BYTES = 128 / QUARTERS  # of shared memory per clock
WARP = 32

PIPES = {
    "fp32": {"FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2"},
    "imad": {"IMAD"},
    "alu": {"LOP3", "ISETP", "FSETP", "FSEL", "FMNMX", "FMNMX3", "IADD3", "IADD", "VIADD", "SEL", "SHF", "PRMT", "F2FP", "PLOP3",
            "LEA", "IMNMX", "VIMNMX", "MOV", "VOTE", "LOP", "POPC", "FLO", "P2R", "R2P", "CS2R", "SGXT", "BREV", "IABS"},
    "mufu": {"MUFU", "I2F", "F2I", "F2F", "I2FP", "F2IP"},
    "shuffle": {"SHFL"},
    "shared": {"LDS", "LDSM", "STS"},
    "tensor": set(TENSOR_OPS),
    # They take a slot of the scheduler; what they wait for is not modelled.
    "issue": {"BRA", "BAR", "BSSY", "BSYNC", "WARPSYNC", "NOP", "EXIT", "LDG", "LDGSTS", "LDGDEPBAR", "DEPBAR", "LDC", "LDCU", "S2R", "S2UR",
              "R2UR", "ULDC", "YIELD", "BREAK", "LEPC", "CALL", "RET", "ERRBAR", "MEMBAR", "CCTL", "UMOV", "VOTEU", "ELECT"},
}  # fmt: skip
PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes}


class CannotModel(Exception):
    """One line: what the model does not know."""


# ------------------------------------------------------------------ counting


@dataclass(frozen=True)
class Instruction:
    opcode: str  # with its modifiers
    target: str  # label of a branch, or empty
    always: bool  # no predicate

    @property
    def base(self):
        return self.opcode.split(".")[0]


def read_instructions(text):
    """Instructions of a kernel as nvdisasm prints it, and where its labels are."""
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            words = code[1].split()
            always = not words[0].startswith("@")
            opcode = words[0 if always else 1]
            # A branch may have a predicate among its operands, too (BRA P0, `(.L_1)).
            branch = re.search(r"`\((\.L\w+)\)", code[1]) if opcode.split(".")[0] == "BRA" else None
            always &= not re.search(r"BRA\S*\s+!?U?P\d", code[1])
            instructions.append(Instruction(opcode, branch[1] if branch else "", always))
    return instructions, labels


def main_loop(instructions, labels):
    """First and last instruction of the loop that has the tensor-core instructions."""
    found = [
        (labels[instruction.target], end)
        for end, instruction in enumerate(instructions)
        if instruction.target and labels[instruction.target] <= end
    ]
    loops = [(begin, end) for begin, end in found if any(i.base in TENSOR_OPS for i in instructions[begin : end + 1])]
    if not loops:
        raise CannotModel("no loop with tensor-core instructions")
    return max(loops, key=lambda loop: loop[1] - loop[0])


def shortest_pass(instructions, labels, begin, end):
    """Counts by opcode on the way from `begin` to `end` that has most tensor-core instructions, and of those ways on the
    shortest. Jumps back, of loops inside, are not taken."""
    best = {end: (0, 1, None)}  # place -> tensor-core instructions and length from there on, and where it goes
    for at in range(end - 1, begin - 1, -1):
        instruction = instructions[at]
        ways = []
        if instruction.target and at < labels[instruction.target] <= end:
            ways.append(labels[instruction.target])
        if not (instruction.base in ("BRA", "EXIT") and instruction.always):
            ways.append(at + 1)
        ways = [way for way in ways if way in best]
        if not ways:
            continue
        way = max(ways, key=lambda place: (best[place][0], -best[place][1]))
        tensor, length, _ = best[way]
        best[at] = (tensor + (instruction.base in TENSOR_OPS), length + 1, way)
    if begin not in best:
        raise CannotModel("no way through the main loop")
    counts, at = Counter(), begin
    while at is not None:
        counts[instructions[at].opcode] += 1
        at = best[at][2]
    return counts


def count_step(text):
    instructions, labels = read_instructions(text)
    return shortest_pass(instructions, labels, *main_loop(instructions, labels))


# ------------------------------------------------------------------ clocks


def shared_bytes(opcode):
    """Of a warp's instruction: LDSM has 128 bytes per matrix; LDS and STS 4 bytes per lane, or what the name says."""
    if opcode.startswith("LDSM"):
        return 128 * int(re.search(r"\.([124])\b", opcode)[1] if re.search(r"\.([124])\b", opcode) else 1)
    bits = re.search(r"\.(64|128)\b", opcode)
    return WARP * (int(bits[1]) // 8 if bits else 4)


def pipe_of(base):
    pipe = PIPE_OF.get(base)
    if pipe is None and base.startswith("U"):  # the uniform datapath is one of its own
        return "issue"
    if pipe is None:
        raise CannotModel(f"opcode {base} belongs to no pipe that the model knows")
    return pipe


def clocks(counts, gpu):
    """Clocks of each pipe of a quarter for these instructions of one warp."""
    lanes = {"fp32": gpu.fp32_lanes, "imad": IMAD_LANES, "alu": ALU_LANES, "mufu": MUFU_LANES, "shuffle": SHUFFLE_LANES}
    spent = Counter()
    for opcode, count in counts.items():
        base = opcode.split(".")[0]
        pipe = pipe_of(base)
        if pipe == "tensor":
            if base not in gpu.peaks:
                raise CannotModel(f"{gpu.name} has no {base}")
            per_clock = gpu.peaks[base] * gpu.share * 1e3 / (gpu.multiprocessors * QUARTERS * gpu.ghz)
            spent[pipe] += count * TENSOR_OPS[base] / per_clock
        elif pipe == "shared":
            spent[pipe] += count * shared_bytes(opcode) / SHARED_BYTES
        elif pipe != "issue":
            spent[pipe] += count * WARP / lanes[pipe]
    # fp32 and imad are one pipe, and shuffles go through that of shared memory.
    spent["fp32"] += spent.pop("imad", 0)
    spent["shared"] += spent.pop("shuffle", 0)
    spent["issue"] = sum(counts.values())
    return spent


@dataclass(frozen=True)
class Projection:
    gpu: Gpu
    kernel: str
    clocks: Counter  # per tile of 128 x 64 and quarter
    low: float  # 10^12 operations per second: tensor cores alternate with all else
    high: float  # all overlaps

    @property
    def limit(self):
        return max(self.clocks, key=lambda pipe: self.clocks[pipe])


def project(gpu, kernel, counts):
    dim = int(kernel.split("_")[2])
    keys = counts_keys(counts, dim)
    parts = -(-dim // CHANNELS_AT_ONCE)
    per_tile = Counter({pipe: spent * TILE_KEYS / keys * parts for pipe, spent in clocks(counts, gpu).items()})
    operations = 4 * WARP_ROWS * TILE_KEYS * dim
    rate = operations * gpu.multiprocessors * QUARTERS * gpu.ghz * 1e-3
    others = max(spent for pipe, spent in per_tile.items() if pipe != "tensor")
    return Projection(gpu, kernel, per_tile, rate / (per_tile["tensor"] + others), rate / max(per_tile.values()))


def counts_keys(counts, dim):
    """Keys of the step that was counted, from its products of queries and keys."""
    products = sum(count for opcode, count in counts.items() if opcode.startswith("IMMA"))
    keys, rest = divmod(products * 8 * 32, dim * (WARP_ROWS // 16))
    if products == 0 or rest or keys % 8:
        raise CannotModel(f"{products} IMMA are no whole step of heads of {dim}")
    return keys


def rank(projections):
    """Per GPU, the fastest first; by the middle of what is projected."""
    return sorted(projections, key=lambda p: (GPUS.index(p.gpu), -(p.low * p.high) ** 0.5))


# ------------------------------------------------------------------ the table


def table(projections):
    lines = [
        "PROJECTION from counted machine code and data sheets. Nothing was measured on a GPU; not a speed.",
        "10^12 operations per second, dense, from 'they alternate' to 'all overlaps'; published: dense, by SageAttention",
        f"{'GPU':<10} {'kernel':<22} {'projected':>12} {'limit':>8} {'published':>10}   clocks per tile and quarter",
    ]
    for p in projections:
        spent = ", ".join(f"{pipe} {clock:.0f}" for pipe, clock in p.clocks.most_common())
        sage = SAGE.get(p.gpu.name)
        lines.append(f"{p.gpu.name:<10} {p.kernel:<22} {p.low:>6.0f}-{p.high:<5.0f} {p.limit:>8} {sage or '-':>10}   {spent}")
    paper = ", ".join(str(figure) for figure in PAPER)
    lines.append(f"the paper's SpargeAttn, with what it skipped counted as if it were computed: {paper}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder with attend.fatbin")
    parser.add_argument("--nvdisasm", required=True, help="with cuobjdump beside it")
    args = parser.parse_args()
    projections = []
    try:
        for (architecture, kernel), text in machine_code(args.images / "attend.fatbin", args.nvdisasm).items():
            counts = count_step(text)
            projections += [project(gpu, kernel, counts) for gpu in GPUS if gpu.architecture == architecture]
    except (CannotModel, OSError) as fault:
        sys.exit(f"cuda_model: {fault}")
    print(table(rank(projections)))


if __name__ == "__main__":
    main()
