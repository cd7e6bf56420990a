#!/usr/bin/env python3
"""Time and bytes of attention over several ranks on this machine, at several bandwidths, beside a dense fp16 ring.

usage: parallel.py [--ranks 1,2,4] [--tokens 8192] [--mbit 0,1000,100] [--json FILE]

Each rank is a process with one thread. A bandwidth other than 0 (none: loopback) puts each rank in a network namespace of
its own, behind a link of that many Mbit/s in either direction (root, iproute2). Figures mean something where the machine has
as many free cores as there are ranks; the cost model that is fitted at the end, and its projection, say what they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, Iterator

Q_HEADS, KV_HEADS, DIM, TARGET_L2 = 8, 2, 64, 0.05
ROUNDS = 3
MADE_BY = f"spb{os.getpid()}"  # begins the names of networks (15 characters at most): those of other runs are not ours
RANKS_S = 600


# ------------------------------------------------------------------ one rank


def heads(tokens: int) -> Any:
    """Slow walks in fp16: the same on all ranks."""
    import torch

    made = torch.Generator().manual_seed(7)
    steps = torch.randn(KV_HEADS, tokens, DIM, generator=made)
    decay = 0.98
    path = torch.zeros_like(steps)
    at = torch.zeros(KV_HEADS, DIM)
    for t in range(tokens):
        at = decay * at + (1 - decay**2) ** 0.5 * steps[:, t]
        path[:, t] = at
    q = 1.2 * path.repeat_interleave(Q_HEADS // KV_HEADS, 0) + 0.1 * torch.randn(Q_HEADS, tokens, DIM, generator=made)
    v = torch.randn(KV_HEADS, tokens, DIM, generator=made)
    return [t.half().unsqueeze(0) for t in (q, path, v)]


def dense_ring(q: Any, k: Any, v: Any) -> int:
    """The peer: contiguous parts in fp16 from neighbour to neighbour, PyTorch's attention, no mask. Returns bytes sent."""
    import torch
    import torch.distributed as dist

    import sparge

    rank, ranks = dist.get_rank(), dist.get_world_size()
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    wide = [t.repeat_interleave(Q_HEADS // KV_HEADS, 1) for t in (k, v)]
    parts, sent = [], 0
    held = torch.stack([k, v])
    for step in range(ranks):
        coming, works = torch.empty_like(held), []
        if step + 1 < ranks:
            works = [dist.irecv(coming, (rank - 1) % ranks), dist.isend(held, (rank + 1) % ranks)]
            sent += held.numel() * 2
        wide = [t.repeat_interleave(Q_HEADS // KV_HEADS, 1) for t in held]
        out, lse = attend(q, wide[0], wide[1])
        parts.append((out.float().contiguous(), lse.float().contiguous()))
        for work in works:
            work.wait()
        held = coming
    sparge.merge(*parts)
    return sent


def run_rank(rank: int, ranks: int, store: str, tokens: int) -> None:
    import torch
    import torch.distributed as dist

    import sparge
    import sparge.distributed as sd

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    q, k, v = [sd.shard(t) for t in heads(tokens)]
    layer = sd.Layer("0", sparge.Settings(target_l2=TARGET_L2), measure_every=1000)  # in the first call
    rows: list[dict[str, Any]] = []
    for schedule in ("ring", "all_gather", "ulysses", "dense fp16"):
        if schedule == "ulysses" and KV_HEADS < ranks:
            continue
        for turn in range(ROUNDS + 1):  # the first one warms up: connections, calibration
            dist.barrier()
            began = time.perf_counter()
            if schedule == "dense fp16":
                row: dict[str, Any] = {"bytes": dense_ring(q, k, v), "waited": None, "computed": 1.0}
            else:
                stats = layer.attention(q, k, v, schedule=schedule, return_stats=True, timeout=120)[1]
                row = {"bytes": stats.bytes_sent, "waited": stats.waited_s, "computed": 1 - stats.sparsity}
            dist.barrier()
            if turn > 0:
                rows.append({"schedule": schedule, "seconds": time.perf_counter() - began, **row})
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------ links


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextlib.contextmanager
def links(ranks: int, mbit: int) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """Per rank: what to put before a command, and its environment."""
    if mbit == 0:
        yield [([], {})] * ranks
        return
    bridge, spaces = f"{MADE_BY}b", [f"{MADE_BY}n{r}" for r in range(ranks)]
    made = []
    try:
        sh(f"ip link add {bridge} type bridge")
        made.append(["link", "del", bridge])
        sh(f"ip link set {bridge} up")
        for r, space in enumerate(spaces):
            sh(f"ip netns add {space}")
            made.append(["netns", "del", space])
            sh(f"ip link add {MADE_BY}v{r} type veth peer name eth0 netns {space}")
            sh(f"ip link set {MADE_BY}v{r} master {bridge} up")
            inside = f"ip netns exec {space}"
            sh(f"{inside} ip addr add 10.77.0.{r + 1}/24 dev eth0")
            sh(f"{inside} ip link set eth0 up")
            sh(f"{inside} ip link set lo up")
            sh(f"{inside} tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 256kb latency 200ms")
        yield [(["ip", "netns", "exec", space], {"GLOO_SOCKET_IFNAME": "eth0"}) for space in spaces]
    finally:
        for what in reversed(made):
            subprocess.run(["ip", *what], check=False)


def measure(ranks: int, mbit: int, tokens: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, links(ranks, mbit) as places:
        processes = []
        try:
            for rank, (before, env) in enumerate(places):
                command = [*before, sys.executable, str(pathlib.Path(__file__).resolve()), "--rank", f"{rank},{ranks},{folder}/store,{tokens}"]
                processes.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True))
            found = [process.communicate(timeout=RANKS_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"parallel.py: {ranks} ranks took more than {RANKS_S} s") from None
        finally:
            for process in processes:
                process.kill()  # nothing where it has ended
                process.wait()
        if any(process.returncode for process in processes):
            raise SystemExit(f"parallel.py: a rank of {ranks} failed")
    rows = json.loads(found[0])
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["schedule"] not in best or row["seconds"] < best[row["schedule"]]["seconds"]:
            best[row["schedule"]] = row
    return [{"ranks": ranks, "mbit": mbit, **row} for row in best.values()]


# ------------------------------------------------------------------ the model


def project(rows: list[dict[str, Any]], tokens: int) -> list[str]:
    """seconds = max(compute, bytes / bandwidth) of a ring, compute from one rank; then 64 nodes and 2^20 tokens."""
    alone = next((r for r in rows if r["ranks"] == 1 and r["schedule"] == "ring"), None)
    others = [r for r in rows if r["ranks"] > 1 and r["schedule"] == "ring"]
    if alone is None or not others:
        return []
    lines = ["cost model of the ring: seconds = max(seconds of one rank / ranks, bytes sent / bandwidth)"]
    for row in others:
        travel = row["bytes"] * 8 / (row["mbit"] * 1e6) if row["mbit"] else 0.0
        model = max(alone["seconds"] / row["ranks"], travel)
        lines.append(f"  {row['ranks']} ranks, {row['mbit'] or 'no limit of'} Mbit/s: measured {row['seconds']:.3f} s, model {model:.3f} s")
    nodes, many = 64, 1 << 20
    compute = alone["seconds"] * (many / tokens) ** 2 / nodes
    part = 2 * KV_HEADS * DIM * 2 * many / nodes * (nodes - 1)
    for gbit in (1, 10, 100):
        travel = part * 8 / (gbit * 1e9)
        lines.append(
            f"  PROJECTION, not measured: {nodes} nodes like one thread here, {many} tokens, the same share of tiles, {gbit} Gbit/s: "
            f"compute {compute:.1f} s, travel {travel:.1f} s"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--mbit", default="0", help="0 = loopback")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, ranks, store, tokens = options.rank.split(",")
        return run_rank(int(rank), int(ranks), store, int(tokens))
    rows = []
    print(f"{'ranks':>5} {'Mbit/s':>7} {'schedule':<11} {'seconds':>8} {'MB sent':>8} {'waited':>7} {'tiles':>6}")
    for ranks in (int(n) for n in options.ranks.split(",")):
        for mbit in (int(n) for n in options.mbit.split(",")):
            if ranks == 1 and mbit:
                continue
            for row in measure(ranks, mbit, options.tokens):
                rows.append(row)
                waited = "" if row["waited"] is None else f"{row['waited']:.3f}"
                print(
                    f"{row['ranks']:>5} {row['mbit'] or '-':>7} {row['schedule']:<11} {row['seconds']:>8.3f} "
                    f"{row['bytes'] / 1e6:>8.2f} {waited:>7} {row['computed']:>6.1%}", flush=True,
                )  # fmt: skip
    print("\n".join(project(rows, options.tokens)))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"tokens": options.tokens, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
