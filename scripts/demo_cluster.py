#!/usr/bin/env python3
"""One rank, then two ranks of this machine, read the same long prompt: perplexity, bytes, who waited for whom.

usage: demo_cluster.py [--tokens N] [--ranks N] [--schedule ring|all_gather|ulysses] [--target-l2 X]
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

# On every Debian machine: the package base-files has them.
LICENCES = pathlib.Path("/usr/share/common-licenses")
TEXTS = ("GPL-3", "GPL-2", "LGPL-2.1", "LGPL-3", "Apache-2.0")


def read(rank, ranks, store, options):
    """One rank; the first one prints figures."""
    import torch
    import torch.distributed as dist

    from sparge.distributed import transformers as sdt
    from sparge.eval._common import load_model

    torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    torch.set_grad_enabled(False)
    model, tokenizer = load_model("smollm2")
    text = "".join((LICENCES / name).read_text(encoding="utf-8") for name in TEXTS)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : options.tokens]
    if ids.shape[1] < options.tokens:
        raise SystemExit(f"--tokens {options.tokens}: the licences have {ids.shape[1]}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    dist.barrier()
    began = time.perf_counter()
    found = sdt.prefill(model, ids, schedule=options.schedule, target_l2=options.target_l2, timeout=300)
    seconds = time.perf_counter() - began
    loss = torch.zeros(1, dtype=torch.float64)
    places = found.positions[found.positions + 1 < ids.shape[1]]
    for some in torch.arange(len(places)).split(512):
        logits = model.get_output_embeddings()(found.hidden[0, some]).float()
        loss += torch.nn.functional.cross_entropy(logits, ids[0, places[some] + 1], reduction="sum").double()
    dist.all_reduce(loss)
    mine = {
        "bytes": sum(s.bytes_sent for s in found.stats), "waited": sum(s.waited_s for s in found.stats),
        "attention": sum(s.time_s for s in found.stats),
    }  # fmt: skip
    everybody = [None] * ranks
    dist.all_gather_object(everybody, mine)
    if rank == 0:
        tiles = [t for s in found.stats for t in s.ranks]
        skipped = 1 - sum(t.qk_computed for t in tiles) / max(sum(t.qk_eligible for t in tiles), 1)
        ppl = math.exp(loss.item() / (ids.shape[1] - 1))
        print(json.dumps({"perplexity": ppl, "skipped": skipped, "seconds": seconds, "ranks": everybody}))
    dist.barrier()
    dist.destroy_process_group()


def start(ranks, options):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
        processes = [
            subprocess.Popen([*command, "--rank", f"{r},{ranks},{folder}/store"], stdout=subprocess.PIPE, text=True) for r in range(ranks)
        ]
        found = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"demo_cluster.py: a rank of {ranks} failed")
    return json.loads(found[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="ring", choices=("ring", "all_gather", "ulysses"))
    parser.add_argument("--target-l2", type=float, default=None)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, ranks, store = options.rank.split(",")
        return read(int(rank), int(ranks), store, options)
    results = {}
    for ranks in (1, options.ranks):
        print(f"{ranks} rank{'s' if ranks > 1 else ''}, {options.tokens} tokens of licences, SmolLM2-135M ...", flush=True)
        results[ranks] = found = start(ranks, options)
        print(f"  perplexity {found['perplexity']:.5f}, {found['skipped']:.1%} of the tiles skipped, {found['seconds']:.1f} s")
        for rank, of in enumerate(found["ranks"]):
            print(f"  rank {rank}: sent {of['bytes'] / 1e6:.1f} MB, waited {of['waited']:.2f} s of {of['attention']:.2f} s in attention")
    one, many = results[1]["perplexity"], results[options.ranks]["perplexity"]
    print(f"perplexity of {options.ranks} ranks over that of one: {many / one - 1:+.2e}")


if __name__ == "__main__":
    main()
