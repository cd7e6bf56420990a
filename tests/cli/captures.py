"""Recorded heads as `sparge tune` and `sparge check` read them, and presets written by hand."""

import json

import numpy as np

from cases import Case, call, structured, write_safetensors


def tensors(r, heads=2, kv_heads=1, tokens=768, dim=32, strength=10.0):
    """q, k, v (H, N, D) whose heads attend to runs of alike tokens."""
    return [x[0] for x in structured(r, 1, heads, kv_heads, tokens, tokens, dim, strength=strength)]


def write_capture(path, q, k, v, causal=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {n: ("F32", x.shape, np.ascontiguousarray(x, np.float32).tobytes()) for n, x in zip("qkv", (q, k, v))}
    write_safetensors(path, named, {"causal": "true" if causal else "false"})
    return path


def head(index, precision="int8", theta=0.3, tau=0.9, pv_skip=8.0, dense=False, select="cdf"):
    measured = {"sparsity": 0.5, "work": 0.5, "l1": 0.01, "l2": 0.01, "round_l1": 0.01, "verified_on": 1}
    if dense:
        tau, pv_skip = 1, "off"
    return {"head": index, "precision": precision, "select": "all" if dense else select, "theta": theta, "tau": tau,
            "pv_skip": pv_skip, "measured": measured}


def layer(heads, kv_heads=1, qk_dim=32, v_dim=32, causal=False):
    return {"q_heads": len(heads), "kv_heads": kv_heads, "qk_dim": qk_dim, "v_dim": v_dim, "causal": causal,
            "samples": ["a"], "held_out": ["b"], "heads": heads}


def write_preset(path, layers, l1=0.5, l2=0.5, round_l1=0.5, **fields):
    preset = {"format": "sparge-preset", "version": 1, "made_by": "a test",
              "bounds": {"l1": l1, "l2": l2, "round_l1": round_l1}, "predictor": "keys", "seed": 0, "layers": layers}
    path.write_text(json.dumps({**preset, **fields}))
    return path


class CaptureCase(Case):

    def good(self, *args):
        result = call(args)
        self.assertEqual(result.code, 0, f"{result.command}\n{result.stderr}")
        return result

    def refused(self, *args, says=()):
        result = call(args)
        self.assertEqual(result.code, 2, f"{result.command}\n{result.stdout}{result.stderr}")
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertEqual(result.stdout, "")
        for part in says:
            self.assertIn(part, result.stderr)
