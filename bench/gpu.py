#!/usr/bin/env python3
"""sparge on an NVIDIA GPU beside torch SDPA, FlashAttention and SageAttention, those of them that are installed.

    bench/gpu.py --library build/cuda/src/libsparge.so --out FOLDER [--tests FILE.json...]

Called by scripts/gpu_check.sh, with what its tests said. Needs NumPy, and no PyTorch: the peers need that. Writes
FOLDER/gpu_check.json (everything) and FOLDER/gpu_check.md (the table, also on stdout). Exit code 1: a test failed, or a
result is not within its bound.

Where the driver is the stand-in that interprets PTX, one small case shows that all of this works; its times are those of an
interpreter, stand in the JSON under that name, and are not shown.
"""

import argparse
import ctypes as c
import importlib
import json
import math
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import sparge_ctypes as sparge

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/cuda/python"))
from gpu_arrays import Driver, Memory

WARM, ROUNDS = 3, 15
HEADS, SAMPLED_ROWS = 16, 24
LENGTHS, DIMS = (4096, 16384, 32768), (64, 128)
KEPT = (0.5, 0.25, 0.1)
ATTRIBUTES = {"multiprocessors": 16, "clock_khz": 13, "capability_major": 75, "capability_minor": 76}  # CUdevice_attribute
# Relative L1 of what is dense against double precision: twice the roundings of q and k in int8 and of p and v, as in
# tests/cuda/gpu_test.cc; e4m3 has 4 bits.
INT8 = 3.5 / 127 / 12**0.5
BOUND = {"f16": 2 * (2 * INT8**2 + 2 * (2**-10 / 12**0.5) ** 2) ** 0.5, "e4m3": 2 * (2 * INT8**2 + 2 * (0.09 / 12**0.5) ** 2) ** 0.5}


# ------------------------------------------------------------------ the machine


def describe(driver):
    name = c.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, 256, 0)
    version = c.c_int()
    driver.call("cuDriverGetVersion", c.byref(version))
    machine = {"gpu": name.value.decode(), "cuda_driver": f"{version.value // 1000}.{version.value % 1000 // 10}", "host": platform.platform()}
    for what, number in ATTRIBUTES.items():
        value = c.c_int()
        try:
            driver.call("cuDeviceGetAttribute", c.byref(value), number, 0)
        except RuntimeError:  # the stand-in has no clock
            continue
        machine[what] = value.value
    machine["interpreter"] = "emulated" in machine["gpu"]
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine["commit"] = commit.stdout.strip()
    return machine


# ------------------------------------------------------------------ what is timed


class Case:
    def __init__(self, tokens, dim, heads, causal):
        self.tokens, self.dim, self.heads, self.causal = tokens, dim, heads, causal
        random = np.random.default_rng([tokens, dim])
        self.q, self.k, self.v = (random.standard_normal((heads, tokens, dim), np.float32).astype(np.float16) for _ in "qkv")

    @property
    def name(self):
        return f"{self.tokens} tokens, {self.heads} x {self.dim}{', causal' if self.causal else ''}"

    @property
    def operations(self):
        pairs = self.tokens * (self.tokens + 1) / 2 if self.causal else self.tokens**2
        return 4 * pairs * self.dim * self.heads

    def error(self, output):
        """Relative L1 of sampled rows of the first and last head against double precision."""
        rows = np.linspace(0, self.tokens - 1, SAMPLED_ROWS).astype(int)
        off = size = 0.0
        for head in {0, self.heads - 1}:
            q, k, v = (np.float64(array[head]) for array in (self.q[:, rows], self.k, self.v))
            scores = q @ k.T / self.dim**0.5
            if self.causal:
                scores[np.arange(self.tokens) > rows[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            expected = weights @ v / weights.sum(1, keepdims=True)
            off += np.abs(np.float64(output[head][rows]) - expected).sum()
            size += np.abs(expected).sum()
        return off / size


class Ours:
    """A plan of the library on the GPU, with everything it needs in the GPU's memory."""

    def __init__(self, context, driver, case, kept=1.0):
        self.library, self.driver = context.library, driver
        desc = self.library.init(sparge.PlanDesc)
        desc.batch, desc.q_heads, desc.kv_heads = 1, case.heads, case.heads
        desc.q_tokens = desc.kv_tokens = case.tokens
        desc.qk_dim = desc.v_dim = case.dim
        desc.causal, desc.precision = int(case.causal), sparge.INT8
        desc.select = sparge.SELECT_ALL if kept == 1 else sparge.SELECT_TOPK
        desc.params.pv_skip, desc.params.theta = math.inf, -1.0
        desc.params.topk = kept if kept < 1 else desc.params.topk
        self.plan = c.c_void_p()
        self.library.call("sparge_plan_create", context.handle, c.byref(desc), c.byref(self.plan))
        self.args = self.library.init(sparge.RunArgs)
        self.memory = []
        self.output = np.zeros_like(case.q)
        for name, array in zip("qkvo", (case.q, case.k, case.v, self.output)):
            memory = self._take(array.nbytes)
            driver.upload(memory.address, array)
            setattr(self.args, name, sparge.Tensor(memory.address, sparge.F16, 0, case.tokens * case.dim, case.dim))
        size = self.library.dll.sparge_plan_workspace_size(self.plan)
        self.args.workspace, self.args.workspace_size = self._take(size).address, size
        self.tiles = np.zeros(4 * case.heads, np.int64)
        self.stats = self._take(self.tiles.nbytes)

    def _take(self, size):
        self.memory.append(Memory(self.driver, size))
        return self.memory[-1]

    def run(self):
        self.library.call("sparge_run", self.plan, c.byref(self.args))

    def results(self):
        """The output, and the share of the tiles that was computed."""
        self.args.head_stats = self.stats.address
        self.run()
        self.args.head_stats = None
        self.driver.download(self.output, self.args.o.data)
        self.driver.download(self.tiles, self.stats.address)
        eligible, computed = self.tiles.reshape(-1, 4)[:, :2].sum(0)
        return self.output, computed / eligible

    def close(self):
        self.library.dll.sparge_plan_destroy(self.plan)
        self.memory.clear()


def time_ours(driver, run, rounds):
    """Milliseconds of each round, by events around it in the default stream."""
    events = [c.c_void_p(), c.c_void_p()]
    for event in events:
        driver.call("cuEventCreate", c.byref(event), 0)
    times = []
    for i in range(WARM + rounds if rounds > 1 else 1):
        driver.call("cuEventRecord", events[0], None)
        run()
        driver.call("cuEventRecord", events[1], None)
        driver.call("cuEventSynchronize", events[1])
        milliseconds = c.c_float()
        driver.call("cuEventElapsedTime_v2", c.byref(milliseconds), *events)
        if i >= WARM or rounds == 1:
            times.append(milliseconds.value)
    for event in events:
        driver.call("cuEventDestroy_v2", event)
    return times


def time_torch(torch, run):
    times = []
    for i in range(WARM + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i >= WARM:
            times.append(begin.elapsed_time(end))
    return times


# ------------------------------------------------------------------ peers


def peers_of(torch):
    """(name, share of tiles, function of q, k, v (1, heads, tokens, dim) and causal), or a reason instead of a function."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    yield "torch SDPA f16", 1.0, lambda q, k, v, causal: sdpa(q, k, v, is_causal=causal)

    def installed(package, function):
        try:
            return getattr(importlib.import_module(package), function)
        except Exception as error:  # noqa: BLE001: whatever a package fails with is the reason
            return f"{type(error).__name__}: {error}"

    flash = installed("flash_attn", "flash_attn_func")
    yield "FlashAttention f16", 1.0, flash if isinstance(flash, str) else (
        lambda q, k, v, causal: flash(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal).transpose(1, 2))  # fmt: skip
    sage = installed("sageattention", "sageattn")
    yield "SageAttention", 1.0, sage if isinstance(sage, str) else (lambda q, k, v, causal: sage(q, k, v, is_causal=causal))
    research = installed("spas_sage_attn", "spas_sage2_attn_meansim_topk_cuda")
    for kept in KEPT:
        yield f"SpargeAttn, top {kept:.0%}", kept, research if isinstance(research, str) else (
            lambda q, k, v, causal, kept=kept: research(q, k, v, is_causal=causal, simthreshd1=-1, topk=kept, pvthreshd=1000))  # fmt: skip


def time_peers(case, machine):
    try:
        import torch

        if machine["interpreter"] or not torch.cuda.is_available():
            raise RuntimeError("it finds no GPU")
    except (ImportError, RuntimeError) as error:
        yield {"who": "peers", "case": case.name, "missing": f"PyTorch with CUDA: {error}"}
        return
    tensors = [torch.from_numpy(array)[None].cuda() for array in (case.q, case.k, case.v)]
    for name, kept, run in peers_of(torch):
        row = {"who": name, "case": case.name, "kept": kept}
        try:
            if isinstance(run, str):
                raise RuntimeError(run)
            output = run(*tensors, case.causal)
            row["error"] = case.error(output[0].float().cpu().numpy()) if kept == 1 else None
            row["ms"] = time_torch(torch, lambda run=run: run(*tensors, case.causal))
        except Exception as error:  # noqa: BLE001: a peer that fails has its reason in the table
            row["missing"] = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield row


# ------------------------------------------------------------------ results


def measure(case, context, driver, machine):
    rounds = 1 if machine["interpreter"] else ROUNDS
    for kept in (1.0, *KEPT):
        row = {"who": "sparge" if kept == 1 else f"sparge, top {kept:.0%}", "case": case.name, "ours": True}
        try:
            ours = Ours(context, driver, case, kept)
            output, row["kept"] = ours.results()
            row["error"] = case.error(output) if kept == 1 else None
            row["ms_of_interpreter" if machine["interpreter"] else "ms"] = time_ours(driver, ours.run, rounds)
            ours.close()
        except RuntimeError as error:  # what was found out until then is worth sending
            row["missing"] = str(error)
        yield row
    yield from time_peers(case, machine)


def read_tests(files):
    """Sums over the files that GoogleTest wrote, and the names of what failed."""
    sums, failed = {"run": 0, "skipped": 0, "failed": 0}, []
    for file in files:
        report = json.loads(Path(file).read_text())
        for suite in report["testsuites"]:
            for test in suite["testsuite"]:
                skipped = test["result"] == "SKIPPED" or test["status"] == "NOTRUN"
                sums["skipped" if skipped else "run"] += 1
                if test.get("failures"):
                    failed.append(f"{suite['name']}.{test['name']}: {' '.join(test['failures'][0]['failure'].split())[:200]}")
    sums["failed"] = len(failed)
    return {**sums, "failures": failed}


def faults_of(tests, rows, bound):
    faults = [f"test {name}" for name in tests["failures"]]
    if tests["run"] == 0:
        faults.append("no test was run")
    faults += [f"{row['who']}, {row['case']}: {row['missing']}" for row in rows if row.get("ours") and "missing" in row]
    faults += [
        f"{row['who']}, {row['case']}: its relative L1 error is {row['error']:.4f}, above {bound:.4f}"
        for row in rows
        if row.get("ours") and row.get("error") is not None and not row["error"] <= bound
    ]
    return faults


def table(machine, tests, rows, faults):
    lines = [
        f"{machine['gpu']}, compute capability {machine['capability_major']}.{machine['capability_minor']}, "
        f"driver of CUDA {machine['cuda_driver']}, sparge {machine['sparge']} ({machine['commit']}, {machine['isa']})",
        "",
        f"Tests: {tests['run']} run, {tests['failed']} failed, {tests['skipped']} not for this GPU",
        "",
    ]
    if machine["interpreter"]:
        lines += ["The kernels were interpreted: there is nothing to say of speed.", ""]
    lines += ["| case | who | tiles | ms, least | ms, median | 10^12 op/s, dense-equivalent | error |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if "missing" in row:
            lines.append(f"| {row['case']} | {row['who']} | missing: {row['missing']} | | | | |")
            continue
        error = "" if row["error"] is None else f"{row['error']:.4f}"
        figures = "| |"
        if "ms" in row:
            least, middle = min(row["ms"]), statistics.median(row["ms"])
            figures = f"{least:.3f} | {middle:.3f} | {row['operations'] / middle / 1e9:.0f}"
        lines.append(f"| {row['case']} | {row['who']} | {row['kept']:.0%} | {figures} | {error} |")
    return "\n".join(lines + ["", *(f"FAULT: {fault}" for fault in faults)]).rstrip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tests", type=Path, nargs="*", default=[], help="what GoogleTest wrote (--gtest_output=json)")
    args = parser.parse_args()
    try:
        driver = Driver()
        machine = describe(driver)
        library = sparge.Library(args.library)
        context = sparge.Context(library, 0, device="cuda:0")
    except (OSError, RuntimeError) as error:
        sys.exit(f"gpu: {error}")
    machine.update(sparge=library.version, isa=context.isa)
    lengths, dims, heads = ((256,), (64,), 1) if machine["interpreter"] else (LENGTHS, DIMS, HEADS)
    tests, rows = read_tests(args.tests), []
    for dim in dims:
        for tokens in lengths:
            for causal in (False, True):
                case = Case(tokens, dim, heads, causal)
                for row in measure(case, context, driver, machine):
                    rows.append({**row, "operations": case.operations})
    bound = BOUND["e4m3" if "e4m3" in context.isa else "f16"] + 2**-11
    faults = faults_of(tests, rows, bound)
    args.out.mkdir(parents=True, exist_ok=True)
    written = {"machine": machine, "tests": tests, "rows": rows, "error_bound": bound, "faults": faults}
    (args.out / "gpu_check.json").write_text(json.dumps(written, indent=1) + "\n")
    text = table(machine, tests, rows, faults)
    (args.out / "gpu_check.md").write_text(text)
    print(text)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
