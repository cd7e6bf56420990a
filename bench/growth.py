"""How our time and memory grow from 1K to 128K tokens: dense, a fixed share of the tiles, a fixed number per row.

Each point is a process of its own, growth.py LIBRARY TOKENS KIND THREADS, which prints JSON: only so is its peak of
memory its own."""

import json
import subprocess
import sys
import time

import numpy as np

import sparge_ctypes as sparge

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SHARE = 0.1
TILES_PER_ROW = 32  # 2048 keys for every block of queries, however long the sequence
DIM = 64
ROUNDS = 3
LIMIT_MS = 120_000  # a point that would take longer is left out, and listed so
LONG_MS = 2000  # a run that takes this long is not repeated: noise is small beside it
# Every kind selects by prediction (top-k), so that stage 1, which is quadratic in blocks, is part of the time.
KINDS = {
    "dense fp32": ("fp32", lambda length: None),
    "dense int8": ("int8", lambda length: None),
    f"sparse int8, {100 * SHARE:g} % of tiles": ("int8", lambda length: SHARE),
    f"sparse int8, {TILES_PER_ROW} tiles per row": (
        "int8", lambda length: min(1.0, TILES_PER_ROW / -(-length // sparge.BLOCK_K))),
}


def smooth_inputs(length):
    """Neighbouring tokens are alike, as in real models, so that prediction has something to find. One head."""
    random = np.random.default_rng(length)
    tensors = []
    for _ in range(3):
        values = random.standard_normal((1, length, DIM), dtype=np.float32)
        coarse = random.standard_normal((1, -(-length // 64), DIM), dtype=np.float32)
        tensors.append(values * 0.5 + np.repeat(coarse, 64, axis=1)[:, :length])
    return tensors


def memory_bytes(field):
    """Of this process: VmRSS is what it holds now, VmHWM the most it ever held."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def reset_peak():
    """Making the inputs takes more memory than the run. Linux forgets the peak so far when asked this way."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def measure_here(library_path, length, kind, threads):
    precision, share_of = KINDS[kind]
    context = sparge.Context(sparge.Library(library_path), threads)
    q, k, v = smooth_inputs(length)
    reset_peak()
    before = memory_bytes("VmRSS")
    attention = sparge.Attention(context, q, k, v, precision, topk=share_of(length))
    times = []
    while len(times) < ROUNDS:
        start = time.perf_counter()
        attention.run()
        times.append(1e3 * (time.perf_counter() - start))
        if times[-1] > LONG_MS:
            break
    return {"kind": kind, "tokens": length, "dim": DIM, "threads": threads, "time_ms": min(times),
            "stages_ms": attention.stages_ms(), "kept": attention.kept(),
            "workspace_bytes": attention.workspace_bytes, "peak_growth_bytes": memory_bytes("VmHWM") - before,
            "input_bytes": q.nbytes + k.nbytes + v.nbytes, "output_bytes": attention.output.nbytes}


def measure_length(library_path, length, threads, shorter):
    """All kinds at one length, one after the other; `shorter` are the points so far."""
    for kind in KINDS:
        base = {"kind": kind, "tokens": length, "dim": DIM, "threads": threads}
        last = [item for item in shorter if item["kind"] == kind][-1:]
        # Twice the length takes up to four times as long.
        expected = 4 * last[0].get("time_ms", LIMIT_MS) if last else 0
        if expected > LIMIT_MS:
            yield {**base, "missing": f"would take more than {LIMIT_MS // 1000} s"}
        else:
            yield measure_one(library_path, length, kind, threads)


def measure_one(library_path, length, kind, threads):
    command = [sys.executable, __file__, library_path, str(length), kind, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"growth, {kind}, N={length}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    try:
        print(json.dumps(measure_here(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    except KeyboardInterrupt:  # the caller says so
        sys.exit(130)
