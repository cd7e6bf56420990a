"""What a wheel is to do where nothing else is installed: run by scripts/wheels.sh with the Python of a new environment.
With --emulated, one call on the demo's data stands for the demo, which takes an emulator many minutes."""

import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import sparge
import sparge.ggml

package = Path(sparge.__file__).parent
assert package.is_relative_to(sys.prefix), package


def run(*arguments):
    program = Path(sysconfig.get_path("scripts")) / "sparge"
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


# The library: close to the reference, and tiles were skipped.
rng = np.random.default_rng(0)
steps = rng.standard_normal((2, 3, 2048, 64)).astype(np.float32)
q, k = (4 * np.cumsum(x, axis=1) / np.sqrt(np.arange(1, 2049))[None, :, None] for x in steps)
v = rng.standard_normal((3, 2048, 64)).astype(np.float32)
q, k = q.astype(np.float32), k.astype(np.float32)
# 16 bits: rounding is nothing beside what skipping may do, 0.03 and a fourth of it for PV, in nearly every head.
out, stats = sparge.attention(q, k, v, causal=True, precision="int16", return_stats=True)
exact = sparge.reference(q, k, v, causal=True)
error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
assert error < 0.05, error
assert stats.sparsity > 0.2, stats

# The command line, and the data for its demo.
assert sparge.__version__ in run("--version")
if "--emulated" in sys.argv:
    with tempfile.TemporaryDirectory() as folder:
        call = json.loads(run("run", "--json", "--tensors", package / "data/video-synthetic.safetensors", "--out", f"{folder}/out.npy"))
    assert call["sparsity"] > 0.3, call
else:
    demo = json.loads(run("demo", "--json"))
    assert len(demo["heads"]) > 5 and demo["total"]["sparsity"] > 0.3, demo["total"]
assert str(sparge.ggml.path().resolve()) in run("llama")

# The backend: all that it needs but ggml's own symbols is there, which come from the program that loads it.
try:
    ctypes.CDLL(str(sparge.ggml.path()), mode=os.RTLD_NOW)
except OSError as reason:
    assert "undefined symbol: ggml" in str(reason), reason
else:
    raise AssertionError("the backend loads without a ggml")

assert len(list((package / "licences").glob("*.txt"))) == 7  # of what is linked in

print(f"sparge {sparge.__version__} in {package}: {stats}, relative L2 error {error:.4f}")
