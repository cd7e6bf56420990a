#!/usr/bin/env python3
"""What it takes to find that all keys of a prompt are those that were packed: by checksums and by a glance.

    bench/studies/glance.py --library build/test/src/libsparge.so --threads 1

Milliseconds that a call of 128 queries packs (the queries themselves are in it), the least of all rounds. 9 heads on 3 of keys, head size 64,
f16 tensors as llama.cpp lays them; eight layers take turns, so that none of them stays in a cache of the processor.
"""

import argparse
import ctypes as c
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sparge_ctypes as sparge  # noqa: E402

HEADS, KV_HEADS, DIM, QUERIES, LAYERS, ROUNDS = 9, 3, 64, 128, 8, 6


def tensor(heads, tokens, kind):
    values = np.random.default_rng(heads).standard_normal((tokens, heads, DIM), dtype=np.float32)
    return values.astype(kind).transpose(1, 0, 2)


class Layer:
    def __init__(self, context, keys, glance):
        self.library, self.out = context.library, np.empty((QUERIES, HEADS, DIM), np.float32).transpose(1, 0, 2)
        self.tensors = tensor(HEADS, QUERIES, np.float32), tensor(KV_HEADS, keys, np.float16), tensor(KV_HEADS, keys, np.float16), self.out
        desc = self.library.init(sparge.PlanDesc)
        desc.batch, desc.q_heads, desc.kv_heads, desc.causal = 1, HEADS, KV_HEADS, 1
        desc.q_tokens, desc.kv_tokens, desc.qk_dim, desc.v_dim = QUERIES, keys, DIM, DIM
        desc.select, desc.cache_tokens, desc.glance = sparge.SELECT_ALL, keys, int(glance)
        self.plan = c.c_void_p()
        self.library.call("sparge_plan_create", context.handle, c.byref(desc), c.byref(self.plan))
        dll = self.library.dll
        self.memory = [np.zeros(size(self.plan), np.uint8) for size in (dll.sparge_plan_workspace_size, dll.sparge_plan_cache_size)]

    def run(self):
        """Milliseconds of packing, and whether all keys were there."""
        args, stats = self.library.init(sparge.RunArgs), self.library.init(sparge.Stats)
        args.q, args.k, args.v, args.o = (sparge.view(x) for x in self.tensors)
        args.workspace, args.cache = (x.ctypes.data for x in self.memory)
        args.workspace_size, args.cache_size = (x.nbytes for x in self.memory)
        args.stats = c.addressof(stats)
        self.library.call("sparge_run", self.plan, c.byref(args))
        return stats.pack_ms, stats.key_blocks == stats.key_blocks_reused


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libsparge.so")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=lambda text: [int(x) for x in text.split(",")], default=[8192, 32768])
    options = parser.parse_args()
    context = sparge.Context(sparge.Library(options.library), options.threads)
    print(f"{context.isa}, {options.threads} threads\n    keys  checksums ms  glance ms")
    for keys in options.tokens:
        least = []
        for glance in (False, True):
            layers = [Layer(context, keys, glance) for _ in range(LAYERS)]
            for layer in layers:
                layer.run()
            rounds = [layer.run() for _ in range(ROUNDS) for layer in layers]
            if not all(known for _, known in rounds):
                sys.exit("keys were packed anew")
            least.append(min(ms for ms, _ in rounds))
        print(f"{keys:8}  {least[0]:12.3f}  {least[1]:9.3f}", flush=True)


if __name__ == "__main__":
    main()
