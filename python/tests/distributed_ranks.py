"""One rank of the tests of sparge.distributed: test_distributed.py starts several of these. Runs cases that are the same on
all ranks, and prints a line of JSON for each: what it got beside what one rank alone gives.

usage: distributed_ranks.py RANK|all RANKS STORE CASES
"""

import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import sparge
import sparge.distributed as sd

DIM = 64
LSE_NONE = -1e30  # in place of -inf
LONG_S = 600.0  # where nobody is lost: on a busy machine a rank may be silent for long


def walks(q_heads, kv_heads, queries, keys, seed, dtype=torch.float32, dim=DIM):
    """Slow walks, so that tiles differ in mass, and some queries that are unlike their neighbours."""
    made = torch.Generator().manual_seed(seed)
    steps = torch.randn(kv_heads, max(keys, queries), dim, generator=made)
    path = torch.zeros_like(steps)
    at = torch.zeros(kv_heads, dim)
    for t in range(steps.shape[1]):
        at = 0.995 * at + 0.1 * steps[:, t]
        path[:, t] = at
    k = path[:, :keys] + 0.5
    own = path.repeat_interleave(q_heads // kv_heads, 0)[:, :queries]
    q = 3 * own + 0.1 * torch.randn(own.shape, generator=made)
    q[:, 7::97] = 3 * torch.randn(q[:, 7::97].shape, generator=made)
    v = torch.randn(kv_heads, keys, dim, generator=made)
    return [t.unsqueeze(0).to(dtype) for t in (q, k, v)]


def l2(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def off(a, b):
    """The largest difference of log-sum-exps, where -inf is only beside -inf."""
    a, b = (t.double().clamp_min(LSE_NONE) for t in (a, b))
    return float((a - b).abs().max()) if a.numel() else 0.0


def whole_map(q, k, options):
    return torch.from_numpy(sparge.predict(q, k, **options)[0])


def compare(case, rank):
    """A case beside one rank."""
    shape = case.get("shape", [4, 2, 1500, 1500])
    dtype = getattr(torch, case.get("dtype", "float32"))
    q, k, v = walks(*shape, seed=case.get("seed", 3), dtype=dtype, dim=case.get("dim", DIM))
    how, shard = case["options"], case.get("shard", "contiguous")
    wanted, lse, stats = sparge.attention(q, k, v, return_lse=True, return_stats=True, **how)
    with_map = case["schedule"] != "ulysses"
    cut = [sd.shard(t, shard=shard) for t in (q, k, v)]
    found = sd.attention(
        *cut, schedule=case["schedule"], shard=shard, return_lse=True, return_stats=True, return_map=with_map, timeout=LONG_S, **how
    )
    out, own_lse, own_stats = found[:3]
    places = sd.positions(q.shape[2], shard=shard)
    result = {
        "bits": bool(torch.equal(out, wanted[:, :, places])),
        "error": l2(out, wanted[:, :, places]) if len(places) else 0.0,
        "lse": off(own_lse, lse[:, :, places]),
        "computed": sum(t.qk_computed for t in own_stats.ranks), "eligible": sum(t.qk_eligible for t in own_stats.ranks),
        "computed by one": stats.qk_tiles["computed"], "eligible of one": stats.qk_tiles["eligible"],
        "imbalance": own_stats.imbalance, "bytes": own_stats.bytes_sent, "tokens": len(places),
        "bytes of": own_stats.bytes_of, "travelled": own_stats.travelled,
    }  # fmt: skip
    if with_map and how.get("select") != "all":
        blocks = [int(p) // 128 for p in places[::128]]
        result["map differs"] = int((found[3] != whole_map(q, k, how)[:, :, blocks]).sum())
    back = sd.unshard(out, shard=shard)
    result["unshard"] = l2(back, wanted)
    return result


def refusal(call):
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def refuse(case, rank):
    """What one rank alone asks for is refused by all; afterwards the group works. `unshard`: its arguments of rank 1, in place
    of `attention` on both ranks, or, with `alone`, on this one."""
    q, k, v = [sd.shard(t) for t in walks(4, 2, 600, 600, seed=1)]
    options = {"tau": 0.8, "causal": True}
    if rank == 1:
        options.update(case.get("options", {}))
        if "dtype" in case:
            k = k.to(getattr(torch, case["dtype"]))
        if "heads" in case:
            q = q[:, : case["heads"]]
        if "tokens" in case:
            q = q[:, :, : case["tokens"]]
        if "version" in case:
            sparge._core.version, kept = (lambda: case["version"]), sparge._core.version
    unshards = case.get("unshard", {}) if rank == 1 else {}
    if unshards.pop("gradient", False):
        q.requires_grad_()
    if "unshard" in case and (rank == 1 or not case.get("alone")):
        with torch.enable_grad():
            text = refusal(lambda: sd.unshard(q, timeout=LONG_S, **unshards))
    else:
        schedule = case.get("schedule", "ring") if rank == 1 else "ring"
        text = refusal(lambda: sd.attention(q, k, v, timeout=LONG_S, schedule=schedule, **options))
    if rank == 1 and "version" in case:
        sparge._core.version = kept
    return {"text": text}


def calibrated(case, rank):
    """One choice for all ranks, the same for any number of them; the error is within the bound."""
    q, k, v = walks(4, 2, 4096, 4096, seed=5)
    cut = [sd.shard(t, shard="zigzag") for t in (q, k, v)]
    layer = sd.Layer("0", sparge.Settings(target_l2=0.05, dense_tail=0))
    sums = []
    for _ in range(2):
        out, stats = layer.attention(*cut, schedule=case["schedule"], shard="zigzag", causal=True, return_stats=True, timeout=LONG_S)
        sums.append([stats.sparsity, sum(t.qk_computed for t in stats.ranks)])
    dense = sparge.attention(q, k, v, causal=True, select="all", precision="int8", pv_skip="off")
    back = sd.unshard(out, shard="zigzag")
    errors = [l2(back[:, h], dense[:, h]) for h in range(4)]
    seldom = sd.Layer("0", sparge.Settings(target_l2=0.05, dense_tail=0), measure_every=2)
    bytes_sent = []
    for _ in range(3):
        stats = seldom.attention(*cut, schedule="ring", shard="zigzag", causal=True, return_stats=True, timeout=LONG_S)[1]
        bytes_sent.append(stats.bytes_sent)
    seldom_same = sum(t.qk_computed for t in stats.ranks)
    return {"sums": sums, "errors": errors, "imbalance": stats.imbalance, "bytes": bytes_sent, "seldom": seldom_same}


def out_of_step(case, rank):
    """A layer that samples each third call, whose memory one rank loses after the first."""
    q, k, v = walks(4, 2, 1500, 1500, seed=5)
    cut = [sd.shard(t) for t in (q, k, v)]
    settings = sparge.Settings(target_l2=0.05, dense_tail=0, min_keys=0)
    layer = sd.Layer("0", settings, measure_every=3)
    dense = sparge.attention(q, k, v, select="all", precision="int8", pv_skip="off")
    bytes_sent, errors = [], []
    for turn in range(6):
        if turn == 1 and rank == 1:
            layer = sd.Layer("0", settings, measure_every=3)
        out, stats = layer.attention(*cut, schedule="all_gather", return_stats=True, timeout=LONG_S)
        bytes_sent.append(stats.bytes_sent)
        errors.append(l2(sd.unshard(out, timeout=LONG_S), dense))
    return {"bytes": bytes_sent, "errors": errors}


def groups(case, rank):
    """Groups that come and go leave nothing: threads, descriptors."""
    q, k, v = [sd.shard(t) for t in walks(2, 2, 600, 600, seed=1)]
    found = {"threads": [], "files": []}
    for _ in range(4):
        group = dist.new_group()
        sd.attention(q, k, v, group=group, target_l2=0, timeout=LONG_S)
        dist.barrier()  # nobody's last call is cut
        found["threads"].append(sum(thread.name.startswith("sparge") for thread in threading.enumerate()))
        found["files"].append(len(os.listdir("/proc/self/fd")))
        dist.destroy_process_group(group)
    return found


def ordered(case, rank):
    """Image tokens along a Hilbert curve: as one rank with a grid."""
    grid, text = [4, 20, 24], 70
    tokens = 4 * 20 * 24 + text
    q, k, v = walks(2, 2, tokens, tokens, seed=9)
    how = {"tau": 0.7, "pv_skip": "off"}
    cut = [sd.shard(t, grid=grid, text_tokens=text) for t in (q, k, v)]
    out, stats = sd.attention(*cut, schedule=case["schedule"], return_stats=True, timeout=LONG_S, **how)
    back = sd.unshard(out, grid=grid, text_tokens=text)
    wanted, one = sparge.attention(q, k, v, grid=grid, text_tokens=text, return_stats=True, **how)
    same = torch.equal(back, wanted)
    return {
        "bits": same, "error": l2(back, wanted), "computed": sum(t.qk_computed for t in stats.ranks),
        "computed by one": one.qk_tiles["computed"], "sparsity": one.sparsity,
    }  # fmt: skip


def small_llama():
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    return model, torch.randint(0, 300, (1, 2100), generator=torch.Generator().manual_seed(1))


def read_prompt(case, rank):
    """A small model reads a prompt over all ranks, and goes on by itself."""
    import sparge.distributed.transformers as sdt

    model, ids = small_llama()
    dist.barrier()  # imports take their time
    found = {}
    for target in (0.0, 0.05):
        read = sdt.prefill(model, ids, target_l2=target, timeout=LONG_S)
        wanted = model.model(ids, use_cache=True)
        found[str(target)] = {
            "hidden": l2(read.hidden, wanted.last_hidden_state[:, read.positions]),
            "keys": l2(read.cache.layers[1].keys, wanted.past_key_values.layers[1].keys),
            "sparsity": read.stats[0].sparsity,
        }
        if target == 0:
            token = {"input_ids": ids[:, -1:] + 1, "position_ids": torch.tensor([[2100]])}
            mine = model(**token, past_key_values=read.cache).logits
            found["next"] = l2(mine, model(**token, past_key_values=wanted.past_key_values).logits)
    found["beside one rank"] = beside_one_rank(ids, rank)
    model.config.sliding_window = 5
    found["refused"] = refusal(lambda: sdt.prefill(model, ids))
    return found


def perplexity(model, ids, read, group):
    """Of all ranks of the group."""
    places = read.positions[read.positions + 1 < ids.shape[1]]
    logits = model.lm_head(read.hidden[0, : len(places)]).double()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, places + 1], reduction="sum")
    dist.all_reduce(loss, group=group)
    return float((loss / (ids.shape[1] - 1)).exp())


def beside_one_rank(ids, rank):
    """The same prompt read by a group of one, which draws the same samples. Random weights look everywhere: only a wide
    bound skips anything."""
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    one, both = small_llama()[0], small_llama()[0]
    wanted = sdt_prefill(one, ids, group=alone)
    read = sdt_prefill(both, ids, schedule="all_gather")
    return {
        "hidden": l2(read.hidden, wanted.hidden[:, read.positions]), "sparsity": [s.sparsity for s in wanted.stats],
        "tiles": [sum(t.qk_computed for s in of.stats for t in s.ranks) for of in (wanted, read)],
        "perplexity": [perplexity(one, ids, wanted, alone), perplexity(both, ids, read, None)],
    }  # fmt: skip


def sdt_prefill(model, ids, **options):
    import sparge.distributed.transformers as sdt

    return sdt.prefill(model, ids, target_l2=0.5, timeout=60, **options)


def denoise(case, rank):
    """Tiny transformers of diffusers under its context parallelism, nothing skipped, beside themselves alone."""
    import diffusers
    import tiny_diffusers as tiny

    from sparge.integrations import diffusers as integration

    found, groups_after = {}, []
    for name in ("flux", "wan"):
        if name == "flux":
            model, inputs = tiny.flux(8, 8)
            inputs.update(encoder_hidden_states=tiny.normal(tiny.BATCH, 14, 24), txt_ids=torch.zeros(14, 3))
        else:
            model, inputs = tiny.wan(2, 8, 8)
        model = tiny.seeded(model)
        wanted = model(**inputs, return_dict=False)[0]
        dist.barrier()
        for degrees in ({"ring_degree": 2}, {"ulysses_degree": 2}):
            parallel = diffusers.ContextParallelConfig(**degrees)
            with integration.enable(model, target_l2=0, parallel=parallel) as enabled:
                out = model(**inputs, return_dict=False)[0]
            calls = sum(layer.totals.calls for layer in enabled.layers.values())
            found[f"{name} {next(iter(degrees))}"] = {"error": l2(out, wanted), "calls": calls}
        found[f"{name} alone again"] = {"error": l2(model(**inputs, return_dict=False)[0], wanted), "calls": 1}
        groups_after.append(len(dist.distributed_c10d._world.pg_map))
    return {"outputs": found, "groups": groups_after, "undone": undone(model, diffusers.ContextParallelConfig(ring_degree=2))}


def undone(model, parallel):
    """Whether a model runs alone again where diffusers fails half way."""
    from unittest import mock

    from sparge.integrations import diffusers as integration

    broken = mock.patch("diffusers.hooks.context_parallel.apply_context_parallel", side_effect=RuntimeError("half way"))
    try:
        with broken:
            integration.enable(model, parallel=parallel)
    except RuntimeError:
        return model._parallel_config is None and integration.enabled(model) is None
    return False


def page(case, rank):
    """The Python of docs/distributed.md as it stands, on a group that is there already."""
    import tiny_diffusers as tiny

    model, ids = small_llama()
    transformer, inputs = tiny.flux(8, 8)
    inputs.update(encoder_hidden_states=tiny.normal(tiny.BATCH, 14, 24), txt_ids=torch.zeros(14, 3))
    q, k, v = walks(4, 2, 1500, 1500, seed=1)
    names = {"q": q, "k": k, "v": v, "model": model, "input_ids": ids, "next_ids": ids[:, -1:], "inputs": inputs}
    names["transformer"] = tiny.seeded(transformer)
    dist.barrier()  # imports take their time
    begin, dist.init_process_group = dist.init_process_group, lambda backend: None
    try:
        for block in case["blocks"]:
            exec(block, names)
    finally:
        dist.init_process_group = begin
    return {"whole": names["whole"].shape[2], "read": names["read"].cache.get_seq_length()}


def traced(case, rank):
    """When keys of others arrived, and what was computed meanwhile."""
    q, k, v = [sd.shard(t) for t in walks(8, 8, 8192, 8192, seed=2)]
    for _ in range(2):
        stats = sd.attention(q, k, v, select="all", precision="fp32", return_stats=True, timeout=LONG_S)[1]
    return {"trace": stats.trace, "waited": stats.waited_s, "bytes": stats.bytes_sent}


def lost(case, rank):
    """One rank does something else; all others get its name, in time."""
    group = dist.new_group()  # it will be spent
    q, k, v = [sd.shard(t) for t in walks(2, 2, 2048, 2048, seed=1)]
    sd.attention(q, k, v, group=group, target_l2=0, timeout=LONG_S)
    dist.barrier()
    print("ready", flush=True)
    if rank == case["rank"]:
        if case["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if case["how"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if case["how"] == "elsewhere":
            time.sleep(case["timeout"] + 5)
            return {}
        if case["how"] == "error":
            run_part, sd._schedules.run_part = sd._schedules.run_part, None
    error = None
    deadline = time.monotonic() + LONG_S
    try:
        while time.monotonic() < deadline:
            began = time.monotonic()  # of the call that is not completed
            sd.attention(q, k, v, group=group, target_l2=0, timeout=case["timeout"])
    except sd.RankError as found:
        error = found
    except TypeError:
        sd._schedules.run_part = run_part
        return {"own": True}
    took = time.monotonic() - began
    try:
        sd.attention(q, k, v, group=group, target_l2=0, timeout=case["timeout"])
        again = None
    except sd.RankError as found:
        again = found.rank
    return {"rank": getattr(error, "rank", None), "text": str(error), "took": took, "again": again}


def missing(case, rank):
    """The group is there, but one rank never calls."""
    group = dist.new_group()
    if rank == case["rank"]:
        time.sleep(case["timeout"] + 4)
        return {}
    q, k, v = [sd.shard(t) for t in walks(2, 2, 600, 600, seed=1)]
    began = time.monotonic()
    try:
        sd.attention(q, k, v, group=group, timeout=case["timeout"])
    except sd.RankError as found:
        return {"rank": found.rank, "text": str(found), "took": time.monotonic() - began}
    return {}


KINDS = (compare, refuse, calibrated, out_of_step, groups, ordered, read_prompt, denoise, page, traced, lost, missing)
KINDS = {kind.__name__: kind for kind in KINDS}


def run_rank(rank, ranks, store, cases):
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for case in cases:
        print(json.dumps(KINDS[case["kind"]](case, rank)), flush=True)
    if cases[-1]["kind"] in ("lost", "missing"):
        os._exit(0)  # docs/distributed.md, "When a rank is lost": a thread may still wait inside gloo
    dist.barrier()
    dist.destroy_process_group()


def fork_all(ranks, store, cases):
    """Imports once, which takes longer than most cases. A rank writes to STORE.RANK."""
    kinds = {case["kind"] for case in cases}
    if kinds & {"read_prompt", "page"}:
        import sparge.distributed.transformers  # noqa: F401
    if kinds & {"denoise", "page"}:
        import tiny_diffusers

        import sparge.integrations.diffusers  # noqa: F401

        tiny_diffusers.flux(8, 8)  # what is imported when it is needed
        tiny_diffusers.wan(2, 8, 8)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            out = os.open(f"{store}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            run_rank(rank, ranks, store, cases)
            sys.exit(0)
        children.append(child)
    return max([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children])


def main():
    which, ranks, store, cases = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    if which == "all":
        sys.exit(fork_all(ranks, store, cases))
    run_rank(int(which), ranks, store, cases)


if __name__ == "__main__":
    main()
