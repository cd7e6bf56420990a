#!/usr/bin/env python3
"""Plants mistakes in the attention kernel, one at a time, and fails unless the GPU's cases find every one of them.

A mistake is an edit of the kernel's source; nvcc compiles it to PTX, which the stand-in driver (tools/ptxrun/libcuda)
runs instead of the kernel in the library. Without a mistake all cases must pass, or finding one would say nothing.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# What the cases are: (program, filter). Ragged lengths, grouped heads, wide scores (Exact*), masks, tiles that are skipped.
CASES = {
    "f16": (
        ("cases", "All/Gpu.*/ragged_f16:All/Gpu.*/gqa_f16:All/Gpu.*/causal_f16:All/Gpu.*/window_f16"),
        ("skips", "GpuSkip.*_64_f16"),
        ("sums", "GpuSums.*"),
    ),
    "fp8": (("cases", "All/Gpu.*/ragged_fp8:All/Gpu.*/causal_fp8"), ("skips", "GpuSkip.*_64_fp8")),
    "f16, heads of 256": (("cases", "All/Gpu.*/dim_256_f16"),),
}
ARCHITECTURES = {"f16": 80, "fp8": 89, "f16, heads of 256": 80}

FETCH = "Fetch(next, last_step ? 0 : step + 1, stage ^ 1);"
# name, instance, text in attend.cu that is there once, what it becomes
MUTANTS = (
    # How data come into shared memory
    ("waits for all but the newest copies", "f16", "WaitForCopies<0>();", "WaitForCopies<1>();"),
    ("no barrier", "f16", "      __syncthreads();  // the step", "      // the step"),
    ("no barrier, fp8", "fp8", "      __syncthreads();  // the step", "      // the step"),
    ("barrier before the wait", "f16", "      WaitForCopies<0>();\n      __syncthreads();", "      __syncthreads();\n      WaitForCopies<0>();"),
    ("first commit missing", "f16", "      Fetch(now, 0, 0);\n      CommitCopies();", "      Fetch(now, 0, 0);"),
    ("commits missing", "f16", "      CommitCopies();\n      const int first_key", "      const int first_key"),
    ("last chunk of a step missing", "f16", "i < kStage; i += kThreads", "i < kStage - 16; i += kThreads"),
    ("one chunk of the queries missing", "f16", "i < QueryBytes(kDim); i += kThreads", "i < QueryBytes(kDim) - 16; i += kThreads"),
    ("copies into the stage in use", "f16", FETCH, FETCH.replace("stage ^ 1", "stage")),
    ("copies the step at hand again", "f16", FETCH, FETCH.replace("next,", "now,")),
    # Fragments
    ("values not transposed", "f16", "LoadMatricesTransposed(b", "LoadMatrices(b"),
    ("fragments of keys swapped", "f16", "MultiplyS8(sums[m][n], a[m], b[0], b[1])", "MultiplyS8(sums[m][n], a[m], b[1], b[0])"),
    ("fragments of queries swapped", "f16", "+ (Lane() & 15);\n        LoadMatrices(a[m]", "+ (Lane() & 7) + 8 * (Lane() >> 4);\n        LoadMatrices(a[m]"),
    ("fragments of values swapped", "f16", "MultiplyF16(o[m][n], a[m], b[0], b[1])", "MultiplyF16(o[m][n], a[m], b[0], b[2])"),
    ("a product of values missing", "f16", "          MultiplyF16(o[m][n + 1], a[m], b[2], b[3]);\n", ""),
    ("a product of keys missing", "f16", "          MultiplyS8(sums[m][n + 1], a[m], b[2], b[3]);\n", ""),
    ("halves of f16 pairs swapped", "f16", "PackF16(pair[0], pair[1])", "PackF16(pair[1], pair[0])"),
    ("e4m3 pairs swapped", "fp8", "PackE4m3(low[0], low[1])", "PackE4m3(low[1], low[0])"),
    ("chunk of the keys not swizzled", "f16", "SwizzledChunk<kDim>(row, 2 * k + ((Lane() >> 3) & 1))", "(2 * k + ((Lane() >> 3) & 1))"),
    # Scores
    ("bias of the integer sums wrong by four", "f16", "12582912.0f", "12582916.0f"),
    ("one scale for two keys", "f16", "(i & 1 ? scale.y : scale.x)", "scale.x"),
    ("mask ends one key late", "f16", "key > keys.last)", "key > keys.last + 1)"),
    ("window begins one key early", "f16", "position - s.window + 1", "position - s.window"),
    ("rows of the warp all see what its first sees", "f16", "Keys all;\n    all.first = __shfl_sync(~0u, KeysOf(kRowsPerLane - 1)", "Keys all;\n    all.first = __shfl_sync(~0u, KeysOf(0)"),
    # Softmax
    ("distance of a shuffle for the maximum", "f16", "fmaxf(most, __shfl_xor_sync(~0u, most, 1))", "fmaxf(most, __shfl_xor_sync(~0u, most, 4))"),
    ("half of the maximum dropped", "f16", "top[r] = fmaxf(most, __shfl_xor_sync(~0u, most, 2))", "top[r] = most"),
    ("distance of a shuffle for the sum", "f16", "sum += __shfl_xor_sync(~0u, sum, 2)", "sum += __shfl_xor_sync(~0u, sum, 4)"),
    ("sign of the maximum", "f16", "Exp2(rows.top[r] - Reference(most))", "Exp2(Reference(most) - rows.top[r])"),
    ("maximum of the step, not of all", "f16", "const float most = fmaxf(rows.top[r], top[r]);", "const float most = top[r];"),
    ("sums not rescaled", "f16", "      rows.sum[r] *= keep;\n", ""),
    ("output not rescaled", "f16", "        o[r / 2][n][(r & 1) * 2] *= keep;\n", ""),
    ("rescales only if all maxima grew", "f16", "!__any_sync(~0u, grew)", "!__all_sync(~0u, grew)"),
    ("skips unless all rows need the values", "f16", "__any_sync(~0u, matters)", "__all_sync(~0u, matters)"),
    ("skips tiles that matter", "f16", "rows.top[r] - skip;", "rows.top[r] + skip;"),
    ("a skipped step counts in the sums", "f16", "    if (!judged.matters) return judged;\n    MoveTops(top);\n    Weigh(scores);\n", "    MoveTops(top);\n    Weigh(scores);\n    if (!judged.matters) return judged;\n"),
    ("e4m3 weights not shifted", "fp8", "Reference(rows.top[r]) - (kFp8 ? kE4m3Shift : 0.0f)", "Reference(rows.top[r])"),
    # Where things are
    ("key head of the first group", "f16", "static_cast<int64_t>(Head() / p.shape.heads_per_kv) * p.shape.all_k_blocks", "0ll * p.shape.all_k_blocks"),
    ("a row too far down", "f16", "ElementAt(p.shape, p.o, s.index, Head(), s.q_begin + q)", "ElementAt(p.shape, p.o, s.index, Head(), s.q_begin + q + 1)"),
    ("a channel too far right", "f16", "StoreElement(p.o, at + channel,", "StoreElement(p.o, at + channel + 1,"),
    ("values of the first half of the channels", "f16, heads of 256", "* kParts + Part()) * kStage", "* kParts) * kStage"),
    ("output of the first half of the channels", "f16, heads of 256", "Part() * kChannels + n * 8", "n * 8"),
    ("skipped tiles not counted", "f16", "left_out += tile.seen && !tile.matters;", "left_out += 0;"),
)
KERNELS = re.compile(r'^extern "C" __global__.*\Z', re.MULTILINE | re.DOTALL)


def instance_of(source, instance):
    """The source with one kernel alone, which nvcc compiles four times as fast."""
    dim, pv = (256 if instance.endswith("256") else 64), instance[:3]
    kernel = (
        'extern "C" __global__ void __launch_bounds__(kThreads, 2)\n'
        f"    sparge_attend_{dim}_{pv}(const __grid_constant__ AttendParams p) {{\n"
        f"  AttendBlock<{dim}, {str(pv == 'fp8').lower()}>(p);\n}}\n}}  // namespace sparge::cuda\n"
    )
    text, count = KERNELS.subn(lambda _: kernel, source)
    if count != 1:
        sys.exit("attend.cu: its kernels are not where they were")
    return text


def compile_ptx(args, folder, name, instance, text):
    source, ptx = folder / f"{name}.cu", folder / f"{name}.ptx"
    source.write_text(instance_of(text, instance), encoding="utf-8")
    # The flags of src/cuda/cuda.cmake; the folder of the kernels for the headers beside attend.cu.
    subprocess.run(
        [args.nvcc, "-std=c++20", "--expt-relaxed-constexpr", "-O3", "--fmad=false", f"-I{args.source}"]
        + [f"-I{args.source}/include", f"-I{args.source}/src/cuda/kernel", f"-arch=compute_{ARCHITECTURES[instance]}"]
        + ["-ptx", str(source), "-o", str(ptx)],
        check=True,
    )
    return ptx


def first_failure(args, instance, ptx):
    """What the cases say against this kernel; empty if nothing."""
    environment = dict(os.environ, LD_LIBRARY_PATH=args.driver, PTXRUN_PTX=str(ptx), PTXRUN_SM=str(ARCHITECTURES[instance]))
    for program, cases in CASES[instance]:
        run = subprocess.run(
            [getattr(args, program), f"--gtest_filter={cases}", "--gtest_fail_fast"],
            env=environment, capture_output=True, text=True, timeout=300,
        )
        if run.returncode == 0:
            if "SKIPPED" in run.stdout or "[  PASSED  ] 0 tests" in run.stdout or "[  PASSED  ]" not in run.stdout:
                sys.exit(f"{program} did not run {cases}:\n{run.stdout[-2000:]}")
            continue
        fault = re.search(r"^ptxrun: .*", run.stderr, re.MULTILINE)
        failed = re.search(r"\[  FAILED  \] ([^\s,]+)", run.stdout)
        if not fault and not failed:
            sys.exit(f"{program} ended with {run.returncode} and says not why:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
        return fault.group()[8:] if fault else f"wrong results in {failed.group(1)}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("nvcc", "source", "cases", "skips", "sums", "driver"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    args = parser.parse_args()
    original = Path(args.source, "src/cuda/kernel/attend.cu").read_text(encoding="utf-8")
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for number, instance in enumerate(CASES):
            against = first_failure(args, instance, compile_ptx(args, Path(folder), f"original_{number}", instance, original))
            if against:
                sys.exit(f"the {instance} kernel fails without a mutant: {against}")
        chosen = [mutant for mutant in MUTANTS if args.only in mutant[0]]
        for number, (name, instance, old, new) in enumerate(chosen):
            if original.count(old) != 1:
                sys.exit(f"{name}: attend.cu has {original.count(old)} times: {old}")
            ptx = compile_ptx(args, Path(folder), f"mutant_{number}", instance, original.replace(old, new))
            against = first_failure(args, instance, ptx)
            print(f"{name}: {against or 'NOT FOUND'}", flush=True)
            if not against:
                missed.append(name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutants were found")
    sys.exit(1 if missed or not chosen else 0)


if __name__ == "__main__":
    main()
