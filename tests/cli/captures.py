"""Recorded heads as `sparge tune` and `sparge check` read them, and presets written by hand."""

import json

import numpy as np

from cases import Case, call, noise, segments, smooth, write_safetensors


class Model:
    """Heads that attend to runs of alike tokens. What a model learned (the kinds) is the same in all its samples."""

    def __init__(self, r, heads=2, kv_heads=1, dim=32, kinds=8, strength=10.0):
        self.group = heads // kv_heads
        self.gain = np.sqrt(strength / np.sqrt(dim))
        # At right angles, or chance would make some kinds alike, and one sample with many of them unlike the others.
        directions = np.linalg.qr(r.standard_normal((kv_heads, dim, dim)))[0][:, :kinds]
        self.kinds = self.gain * np.sqrt(dim) * directions
        self.values = r.standard_normal((kv_heads, kinds, dim))

    def sample(self, r, tokens=768):
        """q, k, v (H, N, D)."""
        heads, kinds, dim = self.kinds.shape
        labels = segments(r, tokens, kinds, shortest=32, longest=96)
        wobble = 0.5 * self.gain
        k = self.kinds[:, labels] + wobble * smooth(r, 1, heads, tokens, dim)[0]
        q = np.repeat(self.kinds, self.group, axis=0)[:, labels]
        q = q + wobble * smooth(r, 1, heads * self.group, tokens, dim)[0]
        return q, k, self.values[:, labels] + noise(r, heads, tokens, dim)


def tensors(r, tokens=768, **model):
    return Model(r, **model).sample(r, tokens)


def write_capture(path, q, k, v, causal=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {n: ("F32", x.shape, np.ascontiguousarray(x, np.float32).tobytes()) for n, x in zip("qkv", (q, k, v))}
    write_safetensors(path, named, {"causal": "true" if causal else "false"})
    return path


def head(index, precision="int8", theta=0.3, tau=0.9, pv_skip=8.0, dense=False, select="cdf"):
    measured = {"sparsity": 0.5, "work": 0.5, "error": 0.01, "pv_error": 0.01, "round_l1": 0.01, "verified_on": 1}
    if dense:
        tau, pv_skip = 1, "off"
    return {"head": index, "precision": precision, "select": "all" if dense else select, "theta": theta, "tau": tau,
            "pv_skip": pv_skip, "measured": measured}


def layer(heads, kv_heads=1, qk_dim=32, v_dim=32, causal=False):
    return {"q_heads": len(heads), "kv_heads": kv_heads, "qk_dim": qk_dim, "v_dim": v_dim, "causal": causal,
            "samples": ["a"], "held_out": ["b"], "heads": heads}


def write_preset(path, layers, target_l1=0.5, pv_l1=0.5, round_l1=0.5, **fields):
    preset = {"format": "sparge-preset", "version": 3, "made_by": "a test",
              "bounds": {"target_l1": target_l1, "pv_l1": pv_l1, "round_l1": round_l1},
              "predictor": "keys", "seed": 0, "layers": layers}
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
