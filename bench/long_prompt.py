#!/usr/bin/env python3
"""One attention layer of a long prompt, through a sparge_layer: what it spends on what, and the time per tile that is computed.

    bench/long_prompt.py --library build/test/src/libsparge.so --tokens 8192,32768                 # white noise
    bench/long_prompt.py --library ... --tokens 1024,8192,32768 FOLDER/*.safetensors               # heads of bench/studies/record.py
    bench/long_prompt.py --library ... --batch 0 --plot growth.png FOLDER/12.safetensors           # the whole prompt in one call

Layout and types are those of llama.cpp: 512 queries at a time (--batch), keys and values in f16, the heads of a token side by side. A length
is the beginning of the recording; one that is longer than it repeats the recording, which no model does, and is marked so. Without files: 9
heads on 3 of keys, head size 64, white noise, of which hardly any tile can be skipped. Needs NumPy; recordings safetensors, --plot Matplotlib.
"""

import argparse
import ctypes as c
import json

import numpy as np

import sparge_ctypes as sparge

SPENT = ("pack", "predict", "schedule", "calibrate")  # beside the kernel


class Layer:
    """A sparge_layer with default bounds. Its descriptor is left as the library fills it, so any size will do that is large enough."""

    def __init__(self, library):
        self.library = library
        size = 512
        desc = (c.c_uint64 * (size // 8))()
        library.dll.sparge_layer_desc_init_sized(desc, c.c_size_t(size))
        self.handle = c.c_void_p()
        library.call("sparge_layer_create", desc, c.byref(self.handle))

    def run(self, context, desc, args):
        self.library.call("sparge_layer_run", self.handle, context.handle, c.byref(desc), c.byref(args), c.c_uint32(0))

    def close(self):
        self.library.dll.sparge_layer_destroy(self.handle)


def noise(tokens):
    random = np.random.default_rng(1)
    return [random.standard_normal((heads, tokens, 64), dtype=np.float32) for heads in (9, 3, 3)]


def recorded(file, tokens):
    """q, k and v (heads, tokens, dim), repeated if there are too few."""
    from safetensors.numpy import load_file

    tensors = load_file(file)
    return [np.resize(np.moveaxis(tensors[name], 1, 0), (tokens, tensors[name].shape[0], tensors[name].shape[2])).transpose(1, 0, 2)
            for name in "qkv"], tensors["q"].shape[1]


def measure(library, context, inputs, tokens, batch):
    """Milliseconds by stage, tiles and blocks of a prompt, from an empty layer on."""
    types = (np.float32, np.float16, np.float16)
    q, k, v = (np.ascontiguousarray(x.transpose(1, 0, 2).astype(kind)).transpose(1, 0, 2) for x, kind in zip(inputs, types))
    out = np.empty((tokens, q.shape[0], v.shape[2]), np.float32).transpose(1, 0, 2)
    layer = Layer(library)
    sums = {name: 0.0 for name in (*SPENT, "kernel", "total")}
    counts = {name: 0 for name in ("qk_eligible", "qk_computed", "key_blocks", "key_blocks_reused")}
    for begin in range(0, tokens, batch):
        end = min(begin + batch, tokens)
        desc = library.init(sparge.PlanDesc)
        desc.batch, desc.q_heads, desc.kv_heads, desc.causal = 1, q.shape[0], k.shape[0], 1
        desc.q_tokens, desc.kv_tokens, desc.qk_dim, desc.v_dim = end - begin, end, q.shape[2], v.shape[2]
        stats = library.init(sparge.Stats)
        args = library.init(sparge.RunArgs)
        args.q, args.k, args.v, args.o = (sparge.view(x) for x in (q[:, begin:end], k, v, out[:, begin:end]))
        args.stats = c.addressof(stats)
        layer.run(context, desc, args)
        for name in sums:
            sums[name] += getattr(stats, f"{name}_ms")
        for name in counts:
            counts[name] += getattr(stats.total if name.startswith("qk") else stats, name)
    layer.close()
    return {"ms": sums, **counts}


def row(tokens, result, threads, repeats):
    ms = result["ms"]
    kept = result["qk_computed"] / result["qk_eligible"]
    spent = " ".join(f"{ms[name]:9.1f}" for name in ("kernel", *SPENT))
    per_tile = 1e3 * threads * ms["kernel"] / result["qk_computed"]
    beside = sum(ms[name] for name in SPENT) / ms["total"]
    mark = " *" if repeats else ""
    return f"{tokens:8}{mark:2} {ms['total']:9.1f} {spent} {100 * beside:6.1f}% {100 * kept:6.1f}% {per_tile:10.2f}"


def plot(path, points, title):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, line in points.items():
        axis.plot([tokens for tokens, _ in line], [us for _, us in line], marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens")
    axis.set_ylabel("microseconds of a thread per computed tile")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--library", required=True, help="libsparge.so")
    parser.add_argument("--tokens", type=lambda text: [int(x) for x in text.split(",")], default=[8192, 32768])
    parser.add_argument("--batch", type=int, default=512, help="queries of a call; 0 = all at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", metavar="PNG")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    library = sparge.Library(options.library)
    library.dll.sparge_layer_destroy.argtypes = [c.c_void_p]
    context = sparge.Context(library, options.threads)
    results, points = [], {}
    if not options.json:
        print(f"{context.isa}, {options.threads} threads, batches of {options.batch or 'all'}; milliseconds of one layer")
        print("  tokens      total    kernel      pack   predict  schedule calibrate  beside   kept  us per tile")
    for file in options.files or [None]:
        if not options.json:
            print(file or "white noise")
        for tokens in options.tokens:
            inputs, length = recorded(file, tokens) if file else (noise(tokens), tokens)
            result = measure(library, context, inputs, tokens, options.batch or tokens)
            results.append({"file": file, "tokens": tokens, "repeats": tokens > length, **result})
            per_tile = 1e3 * options.threads * result["ms"]["kernel"] / result["qk_computed"]
            points.setdefault(file or "white noise", []).append((tokens, per_tile))
            if not options.json:
                print(row(tokens, result, options.threads, tokens > length), flush=True)
    if options.json:
        print(json.dumps({"isa": context.isa, "threads": options.threads, "batch": options.batch, "results": results}))
    elif any(result["repeats"] for result in results):
        print("*: longer than the recording, which is repeated")
    if options.plot:
        plot(options.plot, points, f"{context.isa}, {options.threads} threads, batches of {options.batch or 'all'}")


if __name__ == "__main__":
    main()
