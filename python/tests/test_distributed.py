"""sparge.distributed: ranks are real processes (distributed_ranks.py) with gloo, each started once for many cases."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import sparge
import sparge.distributed as sd
from sparge.distributed._codes import Ways, leave, pack, unpack
from sparge.distributed._shards import segments

RANKS = pathlib.Path(__file__).with_name("distributed_ranks.py")
ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # of a result in that type, relative
STEP_INT8 = 1 / 255  # of probabilities; parts round them relative to other maxima
ALL_S = 1800  # for all cases of a group: minutes, where nothing else is at work


def start(folder, ranks, cases, before=lambda rank: [], **env):
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    store = folder / "store"
    return [
        subprocess.Popen(
            [*before(rank), sys.executable, str(RANKS), str(rank), str(ranks), str(store), json.dumps(cases)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def read(process, timeout=600):
    out, errors = process.communicate(timeout=timeout)
    return found_in(out), errors


def found_in(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(folder, ranks, cases):
    """Per case: what each rank printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    store = folder / "store"
    process = subprocess.Popen(
        [sys.executable, str(RANKS), "all", str(ranks), str(store), json.dumps(cases)],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=ALL_S)
    except subprocess.TimeoutExpired:
        errors = f"not at its end after {ALL_S} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
        process.wait()
    texts = [file.read_text() if file.exists() else "" for file in (folder / f"store.{rank}" for rank in range(ranks))]
    found = [found_in(text) for text in texts]
    everything = "\n".join([errors, *(f"rank {rank}: {text}" for rank, text in enumerate(texts))])
    assert process.returncode == 0 and all(len(lines) == len(cases) for lines in found), everything
    return list(zip(*found))


def case(schedule, shard="contiguous", shape=(4, 2, 1500, 1500), dtype="float32", dim=64, **options):
    if "target_l2" not in options:
        options.setdefault("pv_skip", "off")
    return {"kind": "compare", "schedule": schedule, "shard": shard, "shape": shape, "dtype": dtype, "dim": dim, "options": options}


# Lengths that do not divide, grouped heads, chunked queries, windows, everything that moves scores, and few tokens.
COMPARED = [
    case("all_gather", tau=0.8, causal=True),
    case("all_gather", "zigzag", (8, 2, 1029, 1029), tau=0.8, causal=True, dense_tail=128, pv_skip=8.0),
    case("all_gather", "zigzag", dtype="bfloat16", tau=[0.8, 0.5, 0.9, 1.0], theta=-1.0, precision=["int8", "fp32", "int16", "int8"]),
    case("ring", tau=0.8, precision="fp32"),
    case("ring", "zigzag", tau=0.8, causal=True, precision="fp32"),
    case("ring", "zigzag", (8, 2, 700, 1500), tau=0.8, causal=True, dense_tail=128),
    case("ring", "zigzag", dtype="float16", tau=0.8, causal=True, window=300, pv_skip=None),
    case("ring", shape=(4, 2, 1300, 1300), select="all", causal=True, softcap=20.0, sink_logits=[1, 2, 3, 4], alibi_slopes=[0.5, 0.25, 0.1, 0.01]),
    case("ring", shape=(4, 2, 900, 900), tau=0.8, causal=True, query_offset=-70, precision="int16"),
    case("ring", shape=(4, 1, 100, 100), tau=0.8, causal=True),
    case("ring", shape=(4, 1, 3, 900), tau=0.8, causal=True),
    case("ring", shape=(4, 1, 3, 900), select="all", causal=True),
    case("ring", shape=(4, 4, 1500, 1500), target_l2=0),
    case("ring", "zigzag", tau=0.8, causal=True, precision=["int8", "int8", "int16", "int8"]),
    case("ulysses", shape=(8, 4, 1300, 1300), tau=0.8, causal=True, precision="fp32"),
    case("ulysses", "zigzag", (8, 4, 1300, 1300), "float16", tau=0.8, causal=True, sink_logits=[1, 2, 3, 4, 5, 6, 7, 8]),
]  # fmt: skip
HALVED = [
    case("ring", "zigzag", (4, 2, 2048, 2048), "float16", tau=0.8, causal=True),
    case("ring", shape=(2, 2, 4096, 4096), dtype="bfloat16", dim=128, tau=0.8),
]  # fmt: skip
CALIBRATED = {"kind": "calibrated", "schedule": "ring"}
ORDERED = [{"kind": "ordered", "schedule": schedule} for schedule in ("all_gather", "ring")]
REFUSED = [
    ({"options": {"causal": False}}, "causal is False on rank 1 and True on rank 0"),
    ({"options": {"tau": 0.7}}, "tau is 0.7 on rank 1 and 0.8 on rank 0"),
    ({"dtype": "float16"}, "dtype of k is float16 on rank 1 and float32 on rank 0"),
    ({"heads": 2}, "q heads is 2 on rank 1 and 4 on rank 0"),
    ({"version": "0.0.1"}, "version is 0.0.1 on rank 1"),
    ({"tokens": 100}, "tokens, but its part"),
    ({"options": {"mask": 1}}, "mask is not for several ranks"),
    ({"options": {"select": "cdf"}}, "select='cdf' is not for several ranks"),
    ({"options": {"tua": 0.7}}, "unexpected keyword argument 'tua'; do you mean 'tau'?"),
    ({"options": {"window": -3}}, "window=-3"),
    ({"schedule": "round"}, "schedule='round' is none of ring, all_gather, ulysses"),
    ({"schedule": "\u00e9" * 2000}, "schedule='\u00e9\u00e9"),  # longer than a message
    ({"options": {"threads": 2.7}}, "threads=2.7 is no int"),
    ({"options": {"threads": "x"}}, "threads='x' is no int"),
    ({"options": {"tau": None, "seed": -1}}, "seed=-1 is outside 0.."),
    ({"options": {"tau": None, "target_l2": "x"}}, "target_l2='x' is no float"),
    ({"unshard": {"shard": "zig"}}, "shard='zig' is none of contiguous, zigzag"),
    ({"unshard": {"shard": "zigzag"}}, "shard is zigzag on rank 1 and contiguous on rank 0"),
    ({"unshard": {"dim": 7}}, "dim=7 is none of the 4 dimensions of tensor"),
    ({"unshard": {"grid": [2, 3, 5]}}, "grid is [2, 3, 5] on rank 1 and None on rank 0"),
    ({"unshard": {"gradient": True}}, "tensor: requires a gradient"),
    ({"unshard": {}, "tokens": 100}, "tokens, but its part"),
    ({"unshard": {}, "alone": True}, "call is unshard on rank 1 and attention on rank 0"),
]
OUT_OF_STEP, GROUPS = {"kind": "out_of_step"}, {"kind": "groups"}


PROMPT, DENOISE = {"kind": "read_prompt"}, {"kind": "denoise"}
DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "distributed.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL) if DOCUMENT.exists() else []
PAGE = {"kind": "page", "blocks": BLOCKS}


def asked_of(size):
    """Most is asked of two ranks, and of three what may go wrong in a ring only then; one has little to say."""
    if size == 2:
        others = [{"kind": "refuse", **asked} for asked, _ in REFUSED]
        libraries = [(PROMPT, "transformers"), (DENOISE, "diffusers")]
        there = [asked for asked, library in libraries if importlib.util.find_spec(library)]
        others += [*there, PAGE] if len(there) == 2 and BLOCKS else there
        return [*COMPARED, *HALVED, *ORDERED, CALIBRATED, OUT_OF_STEP, GROUPS, *others, COMPARED[0], {"kind": "traced"}]
    return {1: [*COMPARED[:4], CALIBRATED], 3: [COMPARED[0], *COMPARED[4:8], ORDERED[1]], 4: [COMPARED[1], COMPARED[4], COMPARED[-1], *HALVED]}[size]


def found_of(ranks, asked):
    size, found = ranks
    if json.dumps(asked) not in found:
        pytest.skip(f"not asked of {size} ranks")
    return size, found[json.dumps(asked)]


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request, tmp_path_factory):
    """Everything that a group of so many ranks is asked in these tests, by kind."""
    size = request.param
    cases = asked_of(size)
    found = run(tmp_path_factory.mktemp("ranks"), size, cases)
    return size, {json.dumps(asked): results for asked, results in zip(cases, found)}


@pytest.mark.parametrize("asked", [*COMPARED, *HALVED], ids=lambda asked: f"{asked['schedule']}-{asked['shard']}-{asked['dtype']}-{asked['shape'][2]}")
def test_result_is_that_of_one_rank(ranks, asked):
    size, results = found_of(ranks, asked)
    for result in results:
        assert result["computed"] == result["computed by one"] and result["eligible"] == result["eligible of one"]
        assert result.get("map differs", 0) == 0
        if asked["schedule"] == "all_gather" or size == 1:
            assert result["bits"] and result["unshard"] == 0
        exact = asked["options"].get("precision") == "fp32" or asked["options"].get("target_l2") == 0
        allowed = (1e-6 if exact else STEP_INT8) + ROUNDED.get(asked["dtype"], 0)
        assert result["error"] <= allowed and result["unshard"] <= allowed
        assert result["lse"] <= (1e-5 if exact else STEP_INT8)
    assert sum(result["tokens"] for result in results) == asked["shape"][2]


def test_the_page_about_it(ranks):
    _, results = found_of(ranks, PAGE)
    for result in results:
        assert result == {"whole": 1500, "read": 2101}  # tokens, and with the next one


@pytest.mark.parametrize("asked", ORDERED, ids=lambda asked: asked["schedule"])
def test_grid_is_ordered_before_it_is_cut(ranks, asked):
    size, results = found_of(ranks, asked)
    for result in results:
        assert result["computed"] == result["computed by one"] and result["sparsity"] > 0
        assert result["bits"] or (asked["schedule"] == "ring" and result["error"] <= STEP_INT8)


CHOICES = {}


def test_choice_is_the_same_for_any_number_of_ranks(ranks):
    size, results = found_of(ranks, CALIBRATED)
    for result in results:
        assert result["sums"] == results[0]["sums"]
        assert all(error <= 0.05 * 1.25 * 1.2 for error in result["errors"])  # PV skip, and a single call
        assert result["sums"][1][0] > 0.3
        assert result["imbalance"] <= 1.15
        first, second, third = result["bytes"]
        # Without samples, q, k and v of the other rank's heads stay where they are: 4 + 2 + 2 heads of half the tokens.
        assert size == 1 or first - second > 0.9 * (4 + 2 + 2) / 2 * 4096 / 2 * 64 * 4
        assert abs(third - first) < 20000
    CHOICES[size] = results[0]["sums"]
    assert CHOICES[size] == next(iter(CHOICES.values()))


def test_ranks_that_are_out_of_step_measure_together(ranks):
    size, results = found_of(ranks, OUT_OF_STEP)
    for result in results:
        measured = [sent > result["bytes"][2] * 1.5 for sent in result["bytes"]]
        assert measured == [True, True, False, False, True, False]  # the second call: because one rank has to
        assert all(0 < error <= 0.05 * 1.25 * 1.2 for error in result["errors"])  # as above


def test_destroyed_groups_leave_nothing(ranks):
    size, results = found_of(ranks, GROUPS)
    for result in results:
        assert result["threads"] == [result["threads"][0]] * 4
        assert max(result["files"]) <= result["files"][0] + 2  # not those of a group, of which there are more


def test_ring_sends_keys_once_and_little_else(ranks):
    """Bytes of this rank: its part of the keys and values, and what it passes on, in their own type; surveys, pools and sums
    are a tenth of that, or a fixed number."""
    asked = COMPARED[3]
    size, results = found_of(ranks, asked)
    heads, kv_heads, _, tokens = asked["shape"]
    for result in results:
        assert size == 1 or result["travelled"] == {"int8": 0, "float32": kv_heads}
        parts = 2 * kv_heads * 64 * 4 * (tokens / size + 128) * (size - 1)
        pools = heads * (2 + 6) * (64 * 4 + 8) * (tokens / size / 128 + 1) * (size - 1)
        assert result["bytes"] <= parts + pools + 20000 * (size - 1)


def in_fp16(asked, results, rank):
    """Bytes of keys and values that a rank sends in a ring of fp16: its own, and those of all but its next."""
    passed_on = sum(result["tokens"] for other, result in enumerate(results) if other != (rank + 1) % len(results))
    return 2 * asked["shape"][1] * 2 * asked["dim"] * passed_on


# Per key and value of D channels, in int8: 2 D, three bytes of a float for the key's scale, and 2 D / 64 for what a channel has
# per block, of which the upper bytes are deflated: at most .5195 of 4 D at 64 channels and .5137 at 128.
@pytest.mark.parametrize("asked", HALVED, ids=lambda asked: f"{asked['dtype']}-{asked['dim']}")
def test_int8_heads_send_half_of_fp16(ranks, asked):
    size, results = found_of(ranks, asked)
    for rank, result in enumerate(results):
        sent = dict(result["bytes of"])
        assert result["travelled"] == {"int8": 2, asked["dtype"]: 0}
        assert not [what for what in sent if what.endswith("to measure") or what == "choices"]  # no samples: no bounds
        assert sent["keys and values"] <= 0.52 * in_fp16(asked, results, rank)
        # What is agreed and surveyed is some KiB whatever the length. With all else, pools and sums: two rows of D + 8 bytes
        # per 128 queries and query head, of which the first case has two per kv head, and some for queries unlike the others.
        assert sent.pop("what is asked") == 4096 * (size - 1)
        assert sent.pop("surveys") <= 2 * 2 * (asked["dim"] + 3) * 8 * (size - 1)
        assert sum(sent.values()) <= (0.52 if asked["dim"] == 128 else 0.545) * in_fp16(asked, results, rank)


def test_heads_of_other_precisions_send_their_own_type(ranks):
    asked = next(asked for asked in COMPARED if isinstance(asked["options"].get("precision"), list) and asked["schedule"] == "ring")
    size, results = found_of(ranks, asked)
    for rank, result in enumerate(results):
        assert result["travelled"] == {"int8": 2, "float32": 1}  # the second kv head serves both kinds
        one = in_fp16(asked, results, rank) / 2
        assert 0.5 * 2 + 2 <= result["bytes of"]["keys and values"] / one <= 0.54 * 2 + 2


def test_keys_travel_while_others_are_computed(ranks):
    size, found = ranks
    if size != 2:
        pytest.skip("one size is enough")
    for rank, result in enumerate(found[json.dumps({"kind": "traced"})]):
        # By order, not by overlap: on a busy machine the keys may arrive before the rank itself goes on.
        spans = {what: (begin, end) for what, begin, end in result["trace"]}
        compute, wait = spans[f"compute {rank}"], spans[f"wait keys and values of rank {1 - rank}"]
        assert spans[f"travel {1 - rank}"][0] <= compute[0] < compute[1] <= wait[0]


def test_what_one_rank_asks_alone_is_refused_by_all(ranks):
    size, found = ranks
    if size != 2:
        pytest.skip("one size is enough")
    for asked, text in REFUSED:
        for result in found[json.dumps({"kind": "refuse", **asked})]:
            assert text in result["text"]


def test_a_prompt_is_read_by_two_ranks_and_goes_on_by_one(ranks):
    size, results = found_of(ranks, PROMPT)
    for result in results:
        exact = result["0.0"]
        assert exact["hidden"] <= 1e-5 and exact["keys"] <= 1e-5 and result["next"] <= 1e-5  # two layers in fp32
        assert result["0.05"]["hidden"] <= 0.05 * 1.25 * 1.2
        beside = result["beside one rank"]  # in all_gather
        assert max(beside["sparsity"]) > 0.05 and beside["tiles"][0] == beside["tiles"][1] and beside["hidden"] <= 1e-5
        assert abs(beside["perplexity"][1] / beside["perplexity"][0] - 1) <= 1e-3
        assert "a sliding window of 5 tokens is not for several ranks" in result["refused"]


def test_diffusers_runs_its_context_parallelism_with_us(ranks):
    size, results = found_of(ranks, DENOISE)
    for result in results:
        assert len(result["outputs"]) == 6
        for found in result["outputs"].values():
            assert found["error"] <= 1e-5 and found["calls"] > 0
        assert result["undone"]
        assert result["groups"][0] == result["groups"][1]  # whoever comes later takes the mesh that is there


# ------------------------------------------------------------------ failure

TIMEOUT = 6.0  # of silence: a healthy rank of a busy machine may be silent for seconds
# docs/distributed.md promises the timeout and two seconds; the others are for processes that wait for a processor.
WITHIN = TIMEOUT + 2 + 10
LOST = [("kill", 3, 1), ("stop", 3, 0)]


def check_lost(result, culprit, errors=""):
    assert result.get("rank") == culprit, (result, errors)
    assert f"rank {culprit}" in result["text"]
    assert result["took"] <= WITHIN
    assert result.get("again", culprit) == culprit


@pytest.mark.parametrize("how, size, culprit", LOST, ids=[how for how, _, _ in LOST])
def test_a_lost_rank_is_named_in_time(tmp_path, how, size, culprit):
    processes = start(tmp_path, size, [{"kind": "lost", "how": how, "rank": culprit, "timeout": TIMEOUT}])
    try:
        for rank, process in enumerate(processes):
            if rank == culprit:
                continue
            lines, errors = read(process)
            assert lines, errors
            check_lost(lines[0], culprit, errors)
            assert process.wait(timeout=60) == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_rank_with_other_business_is_named_in_time(tmp_path):
    """It fails by itself, does not come to a call, or to none at all; each time another group is spent."""
    asked = [{"kind": "lost", "how": how, "rank": 1, "timeout": TIMEOUT} for how in ("error", "elsewhere")]
    found = run(tmp_path, 2, [*asked, {"kind": "missing", "rank": 1, "timeout": TIMEOUT}])
    assert found[0][1] == {"own": True}
    for first, _ in found:
        check_lost(first, 1)


@pytest.fixture
def machines():
    """Three network namespaces on a bridge, where that is allowed: as good as machines."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    name = f"spt{os.getpid()}"  # 15 characters at most; those of other runs are not ours
    bridge, made = f"{name}b", []

    def sh(command):
        done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
        if re.search("not permitted|denied|not supported|Unknown device", done.stderr):  # of a container, or a small kernel
            pytest.skip(f"ip {command}: {done.stderr.strip()}")
        assert done.returncode == 0, f"ip {command}: {done.stderr}"

    try:
        sh(f"link add {bridge} type bridge")
        made.append(f"link del {bridge}")
        sh(f"link set {bridge} up")
        for r in range(3):
            sh(f"netns add {name}n{r}")
            made.append(f"netns del {name}n{r}")
            sh(f"link add {name}v{r} type veth peer name eth0 netns {name}n{r}")
            sh(f"link set {name}v{r} master {bridge} up")
            for command in (f"addr add 10.78.0.{r + 1}/24 dev eth0", "link set eth0 up", "link set lo up"):
                sh(f"-n {name}n{r} {command}")
        yield name, sh
    finally:
        for command in reversed(made):
            subprocess.run(["ip", *command.split()], check=False)


def test_a_rank_that_is_cut_off_is_named_by_the_others(tmp_path, machines):
    asked = [{"kind": "lost", "how": "cut", "rank": 1, "timeout": TIMEOUT}]
    name, sh = machines
    processes = start(tmp_path, 3, asked, lambda rank: ["ip", "netns", "exec", f"{name}n{rank}"], GLOO_SOCKET_IFNAME="eth0")
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.communicate()
        sh(f"link set {name}v1 down")
        for rank, process in enumerate(processes):
            lines, errors = read(process)
            assert lines, errors
            # From where the lost one stands, the others are.
            assert (lines[0]["rank"] == 1) == (rank != 1), (lines, errors)
            assert lines[0]["took"] <= WITHIN
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# ------------------------------------------------------------------ alone


@pytest.mark.parametrize("shard", ["contiguous", "zigzag"])
def test_segments_are_whole_blocks_and_all_of_them(shard):
    for tokens in (0, 1, 127, 128, 129, 1000, 4096, 5003):
        for ranks in (1, 2, 3, 4, 7):
            parts = [segment for rank in range(ranks) for segment in segments(tokens, rank, ranks, shard)]
            assert sorted(p for s in parts for p in range(s.first, s.end)) == list(range(tokens))
            assert all(segment.first % 128 == 0 for segment in parts)
            assert all(segment.end % 128 == 0 or segment.end == tokens for segment in parts)


def alone(k, v, precision):
    """A call of one rank, its survey, and how its heads travel."""
    call = types.SimpleNamespace(q=k, k=k, v=v, q_tokens=k.shape[2], k_tokens=k.shape[2], threads=1, same_integers=True)
    survey = np.zeros(k.shape[0] * k.shape[1] * (k.shape[3] + 3))
    views = [sparge._arrays.torch_view(name, t) for name, t in (("k", k), ("v", v))]
    sparge._core.predict_part(views[0], views[0], views[1], {"select": "all"}, {"key_survey_out": survey})
    return call, survey, Ways(call, {"precision": precision})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("heads", [[0, 1], [1]], ids=["all heads", "one head"])
def test_codes_come_back_to_the_bit(dtype, heads):
    """Values of very different size, a spike and a token beside which others are large (second half of bits), zeros, NaN."""
    made = torch.Generator().manual_seed(4)
    k, v = (torch.randn(2, 2, 330, dim, generator=made) for dim in (38, 24))
    v *= 2.0 ** torch.randint(-12, 6, (24,), generator=made)
    v[0, 1, 100] *= 1e-3
    v[1, :, 200, 3] = 1000
    v[0, :, :64, 5] = 0
    k[1, 1, 70, 2] = torch.nan
    k, v = (t.to(getattr(torch, dtype)) for t in (k, v))
    call, survey, ways = alone(k, v, ["int8" if head in heads else "fp32" for head in range(2)])
    assert ways.coded == heads and ways.plain == [head for head in range(2) if head not in heads]
    codes = leave(call, survey)
    assert codes["fine"][:, heads].any() and codes["not_finite"][:, heads].any()
    packed = pack(call, codes, ways, survey)
    found = unpack(call, packed, ways, survey, 330)
    used = np.repeat(codes["fine"] > 0, 64, axis=2)[:, heads, :330]
    for name, array in codes.items():
        wanted, got = array[:, heads], found[name][:, heads]
        if name == "fine_values":  # the rest is not read
            wanted, got = wanted[used], got[used]
        assert wanted.tobytes() == got.tobytes(), name
    # A channel of a block has a byte beside its integers, of three in fp32.
    entries = codes["value_scales"][:, heads].size
    integers = 2 * len(heads) * 330 * (40 + 24) + used.sum() * 24
    rest = packed.numel() - integers - entries * (v.element_size() - 1) - 2 * len(heads) * 330 * 3
    assert 0 < rest < 0.75 * entries + 400  # upper bytes, deflated


@pytest.mark.parametrize("file", sorted((pathlib.Path(__file__).parents[2] / "data").glob("*.safetensors")), ids=lambda file: file.stem)
def test_real_heads_take_half_of_fp16(file):
    """64 channels; a head with a sink has one block of 64 that needs its second half of bits: 64 bytes more per value there."""
    load = pytest.importorskip("safetensors.torch").load_file
    k, v = (load(file)[name].unsqueeze(0) for name in "kv")
    call, survey, ways = alone(k, v, "int8")
    codes = leave(call, survey)
    share = pack(call, codes, ways, survey).numel() / (k.nbytes + v.nbytes)
    assert share <= 0.5195 + 0.25 * (codes["fine"] > 0).mean()
    assert (codes["fine"] > 0).mean() <= 1 / 32


def test_without_a_group_there_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="init_process_group"):
        sd.attention(*[torch.zeros(1, 1, 4, 4)] * 3)
    with pytest.raises(ValueError, match="preset is not for several ranks"):
        import dataclasses

        settings = dataclasses.replace(sd.Settings())
        object.__setattr__(settings, "preset", object())
        sd.Layer("0", settings)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), 1e10, "60"])
def test_timeouts_are_refused_by_name(timeout):
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="timeout="):
        sd.attention(q, q, q, timeout=timeout)
    with pytest.raises(ValueError, match="timeout="):
        sd.unshard(q, timeout=timeout)
