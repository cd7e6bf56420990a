"""sparge.attention and the functions beside it, against a dense softmax in double precision. Needs NumPy only."""

import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import sparge
from oracle import LEVELS, assert_near, dense, noise, qkv, read_head, relative_l1, resident

PATIENCE_S = 600  # on a busy machine an import may take minutes
SHAPES = [(2, 4, 150, 40), (2, 2, 330, 40)]  # ragged blocks, groups of two heads

# ------------------------------------------------------------------ what is computed

PROBLEMS = {
    "plain": {},
    "scale": dict(scale=0.3),
    "causal": dict(causal=True),
    "causal, top-left": dict(causal=True, query_offset=0),
    "causal, the first queries see nothing": dict(causal=True, query_offset=-20),
    "window": dict(causal=True, window=70),
    "window on one side": dict(window=100, query_offset=64),
    "softcap": dict(softcap=0.7),
    "slopes": dict(alibi_slopes=[0.5, 0.1, 0.02, 0.0], causal=True),
    "sinks": dict(sink_logits=[1.0, -2.0, 6.0, 0.0]),
    "everything": dict(causal=True, window=200, softcap=2.0, alibi_slopes=[0.1] * 4, sink_logits=[0.5] * 4, scale=0.2),
}


@pytest.mark.parametrize("precision", LEVELS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_dense(problem, precision):
    options = PROBLEMS[problem]
    q, k, v = qkv(*SHAPES, v_dim=24)
    out, lse = sparge.attention(q, k, v, target_l1=0, precision=precision, return_lse=True, **options)
    expected, expected_lse = dense(q, k, v, **options)
    assert_near(out, expected, precision)
    np.testing.assert_allclose(lse, expected_lse, atol=4 * LEVELS[precision])
    assert np.all(out[np.isinf(expected_lse)] == 0)


def test_exact_is_the_default_of_a_bound_of_zero_and_the_reference_agrees():
    q, k, v = qkv(*SHAPES)
    expected, expected_lse = dense(q, k, v, causal=True)
    assert_near(sparge.attention(q, k, v, causal=True, target_l1=0), expected, "fp32")
    out, lse = sparge.reference(q, k, v, causal=True, return_lse=True)
    # Computed in double, rounded once.
    np.testing.assert_allclose(out, expected, rtol=2**-22, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=2**-22)


@pytest.mark.parametrize("shape", [(150, 330), (4, 150, 330), (1, 150, 330), (2, 1, 150, 330), (2, 4, 1, 330), (2, 4, 150, 330)], ids=str)
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32, np.float16], ids=lambda d: np.dtype(d).name)
def test_masks(shape, dtype):
    q, k, v = qkv(*SHAPES)
    seen = np.random.default_rng(5).random(shape) < 0.6
    seen[..., :40, :] = seen[..., :1, :]
    mask = seen.astype(dtype) if dtype in (bool, np.uint8) else np.where(seen, noise(*shape), -np.inf).astype(dtype)
    assert_near(sparge.attention(q, k, v, mask=mask, target_l1=0), dense(q, k, v, mask=mask)[0], "fp32")


def test_a_masked_row_is_zero():
    q, k, v = qkv((2, 8, 16), (2, 20, 16))
    mask = np.ones((8, 20), bool)
    mask[3] = False
    out, lse = sparge.attention(q, k, v, mask=mask, target_l1=0, return_lse=True)
    assert np.all(out[:, 3] == 0) and np.all(np.isneginf(lse[:, 3])) and np.all(np.isfinite(lse[:, 4]))


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_dimensions_and_layouts(dims, layout):
    q, k, v = qkv(*SHAPES, v_dim=24)
    expected, expected_lse = (x[(0,) * (4 - dims)] for x in dense(q, k, v, causal=True))
    q, k, v = (x[(0,) * (4 - dims)] for x in (q, k, v))
    if layout == "NHD" and dims > 2:
        q, k, v, expected = (x.swapaxes(-2, -3).copy() for x in (q, k, v, expected))
    options = dict(layout=layout, causal=True, target_l1=0)
    out, lse = sparge.attention(q, k, v, return_lse=True, **options)
    assert_near(out, expected, "fp32")
    np.testing.assert_allclose(lse, expected_lse, atol=4 * LEVELS["fp32"])  # (B, H, N) in both layouts
    blocks, _ = sparge.predict(q, k, layout=layout, causal=True, tau=0.9)
    assert blocks.shape == (2, 4, 2, 6)[4 - dims :]


def test_map_is_what_is_computed():
    q, k, v = qkv((2, 4, 300, 32), (2, 2, 500, 32))
    tiles = np.random.default_rng(1).random((2, 4, 3, 8)) < 0.4
    tiles[..., 0] = True
    out, stats = sparge.attention(q, k, v, select="map", map=tiles, precision="fp32", pv_skip="off", return_stats=True)
    assert_near(out, dense(q, k, v, tiles=tiles)[0], "fp32")
    assert stats.qk_tiles == {"eligible": tiles.size, "computed": int(tiles.sum())}
    assert [computed for _, computed, _, _ in stats.heads] == tiles.sum((2, 3)).ravel().tolist()
    assert_near(sparge.reference(q, k, v, map=tiles), dense(q, k, v, tiles=tiles)[0], "fp32")
    shared = sparge.attention(q, k, v, map=tiles[0, :1], precision="fp32", pv_skip="off")  # select="map" by itself
    assert_near(shared, dense(q, k, v, tiles=tiles[0, :1])[0], "fp32")


@pytest.mark.parametrize("rule", [dict(tau=0.95), dict(topk=0.3), dict(select="cdf", tau=0.9, theta=0.2, pv_skip=8.0)], ids=str)
def test_predict_agrees_with_attention(rule):
    q, k, v, causal = read_head("smollm2-local")
    q, k, v = q[:, :1000], k[:, :1000], v[:, :1000]
    tiles, predicted = sparge.predict(q, k, causal=causal, precision="fp32", **rule)
    out, stats = sparge.attention(q, k, v, causal=causal, precision="fp32", return_stats=True, **{"pv_skip": "off", **rule})
    assert predicted.qk_tiles == stats.qk_tiles
    assert tiles.sum() == stats.qk_tiles["computed"] < stats.qk_tiles["eligible"]
    if rule.get("pv_skip") is None:
        assert_near(out, dense(q, k, v, causal=causal, tiles=tiles)[0], "fp32")
    else:
        assert stats.pv_tiles["computed"] < stats.pv_tiles["eligible"]


@pytest.mark.parametrize("name", ["smollm2-local", "smollm2-sink"])
def test_auto_keeps_its_bounds_on_real_heads(name):
    q, k, v, causal = read_head(name)
    calibration = sparge.Calibration(len(q), target_l1=0.05)
    for _ in range(12):  # the first choices rest on a dozen samples, and may be corrected
        out, stats = sparge.attention(q, k, v, causal=causal, calibration=calibration, return_stats=True)
    whole = sparge.attention(q, k, v, causal=causal, select="all", pv_skip="off")  # the same precision: what skipping costs
    assert stats.sparsity > 0.1
    for h in range(len(q)):
        estimate = calibration.head(h)
        assert estimate.precision == "int8" and estimate.state == "sparse" and estimate.samples > 0
        assert relative_l1(out[h], np.float64(whole[h])) <= 1.2 * sparge._core.PV_ROOM * 0.05  # docs/tuning.md: pv_l1, on one sample
    assert "sparse" in repr(calibration)
    once, first = sparge.attention(q, k, v, causal=causal, target_l1=0.05, return_stats=True)
    assert first.stages_ms["calibrate"] > 0


# ------------------------------------------------------------------ what belongs to a result


def test_stats_are_consistent():
    q, k, v, causal = read_head("smollm2-local")
    q, k, v = q[:, :1024], k[:, :1024], v[:, :1024]
    out, lse, stats = sparge.attention(q, k, v, causal=causal, tau=0.9, pv_skip=6.0, return_lse=True, return_stats=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    sums = np.sum(stats.heads, axis=0)
    assert sums.tolist() == [stats.qk_tiles["eligible"], stats.qk_tiles["computed"], stats.pv_tiles["eligible"], stats.pv_tiles["computed"]]
    assert stats.qk_tiles["eligible"] == 2 * sum(2 * (i + 1) for i in range(8))  # two heads, the causal triangle
    assert stats.sparsity == pytest.approx(1 - sums[1] / sums[0])
    assert stats.work == pytest.approx((sums[1] / sums[0] + sums[3] / sums[2]) / 2)
    assert stats.head_sparsity == pytest.approx([1 - c / e for e, c, _, _ in stats.heads])
    assert stats.isa in [isa["name"] for isa in sparge.isas()] and stats.threads >= 1
    assert sum(stats.stages_ms.values()) <= stats.time_ms * 1.01 + 0.01


def test_merge_of_halves_is_the_whole():
    q, k, v = qkv((2, 4, 70, 32), (2, 2, 300, 32))
    parts = [
        sparge.attention(q, k[:, :, part], v[:, :, part], target_l1=0, return_lse=True)
        for part in (slice(0, 120), slice(120, None), slice(0, 0))
    ]
    merged = sparge.merge(sparge.merge(*parts[:2]), parts[2])
    expected = dense(q, k, v)
    assert_near(merged[0], expected[0], "fp32")
    np.testing.assert_allclose(merged[1], expected[1], atol=4 * LEVELS["fp32"])


PARTS = {1: [300], 2: [120, 300], 3: [1, 299, 300], 8: [0, 64, 65, 65, 100, 229, 300, 300]}  # where parts of the keys end


@pytest.mark.parametrize("count", PARTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: np.dtype(d).name)
def test_merge_of_any_number_of_parts(count, dtype):
    q, k, v = qkv((2, 4, 70, 32), (2, 2, 300, 32), dtype=dtype)
    ends = PARTS[count]
    assert len(ends) == count and (count < 8 or len(set(ends)) < count)  # among eight, some are empty
    parts = [
        sparge.attention(q, k[:, :, begin:end], v[:, :, begin:end], target_l1=0, return_lse=True)
        for begin, end in zip([0, *ends], ends)
    ]
    merged, lse = sparge.merge(*parts)
    expected, expected_lse = dense(q, k, v)
    # Each part was rounded to the type of q before.
    assert merged.dtype == dtype and lse.dtype == np.float32
    assert relative_l1(merged, expected) <= LEVELS["fp32"] + 2 * (2.0**-11 if dtype is np.float16 else 0)
    np.testing.assert_allclose(lse, expected_lse, atol=4 * LEVELS["fp32"])
    one, two = (sparge.merge(*parts, threads=threads) for threads in (1, 2))
    assert [x.tobytes() for x in one] == [x.tobytes() for x in two]


def test_merge_on_all_threads_and_without_weights():
    parts = [(noise(1, 8, 1000, 64, seed=i), noise(1, 8, 1000, seed=i)) for i in range(5)]  # enough to wake others
    one, many = (sparge.merge(*parts, threads=threads) for threads in (1, 4))
    assert [x.tobytes() for x in one] == [x.tobytes() for x in many]
    weights = np.exp(np.array([lse for _, lse in parts], float))
    expected = sum(w[..., None] * out for w, (out, _) in zip(weights, parts)) / weights.sum(0)[..., None]
    assert_near(one[0], expected, "fp32")
    nothing = (np.full((1, 8, 1000, 64), np.nan, np.float32), np.full((1, 8, 1000), -np.inf, np.float32))
    assert [x.tobytes() for x in sparge.merge(nothing, *parts, nothing)] == [x.tobytes() for x in one]
    out, lse = sparge.merge(nothing, nothing, nothing)
    assert np.all(out == 0) and np.all(np.isneginf(lse))
    assert sparge.merge(*[(x[:, :, :0], y[:, :, :0]) for x, y in parts])[0].shape == (1, 8, 0, 64)


def test_token_order():
    for grid in ((1, 1, 1), (4, 6, 8), (3, 5, 7)):
        cells = np.prod(grid)
        for order in ("hilbert", "row-major", "time-major", "random"):
            assert np.array_equal(np.sort(sparge.token_order(grid, order)), np.arange(cells))
        steps = np.diff(np.array(np.unravel_index(sparge.token_order(grid), grid)), axis=1)
        # Even sides: always to a neighbour. Odd ones may force a diagonal step.
        assert np.abs(steps).max(initial=0) <= 1 and (3 in grid or np.all(np.abs(steps).sum(0) == 1))
    assert np.array_equal(sparge.token_order((4, 6, 8), "row-major"), np.arange(192))
    assert not np.array_equal(sparge.token_order((4, 6, 8), "random", 1), sparge.token_order((4, 6, 8), "random", 2))


@pytest.mark.parametrize("text", [dict(), dict(text_tokens=20), dict(text_tokens=20, text_after=True)], ids=str)
def test_grid_changes_nothing_but_the_order(text):
    q, k, v = qkv(*[(2, 3, 4 * 8 * 8 + text.get("text_tokens", 0), 32)] * 2)
    out = sparge.attention(q, k, v, grid=(4, 8, 8), target_l1=0, **text)
    assert_near(out, dense(q, k, v)[0], "fp32")


def test_a_curve_costs_nothing_beside_attention():
    """Which is why every call lays its own."""

    def seconds(call):
        times = []
        for _ in range(5):
            begin = time.process_time()
            call()
            times.append(time.process_time() - begin)
        return min(times)

    grid, x = (3, 32, 32), noise(2, 3 * 32 * 32, 64)
    attention = seconds(lambda: sparge.attention(x, x, x, grid=grid, threads=1))
    # 0.3 % of it (AMD EPYC, family 26, model 2). On a busy machine others take the caches, and the shorter one loses more by it.
    assert seconds(lambda: sparge.token_order(grid)) < 0.05 * attention


def test_packed_batch_is_its_sequences():
    q, k, v = qkv((4, 300, 32), (2, 520, 32))
    offsets = dict(q_offsets=[0, 10, 10, 150, 300], kv_offsets=np.array([0, 200, 210, 211, 520]))
    out, lse, stats = sparge.attention(q, k, v, causal=True, target_l1=0, return_lse=True, return_stats=True, **offsets)
    assert len(stats.heads) == 4 * 4
    for (a, b), (c, d) in zip(*(list(zip(o[:-1], o[1:])) for o in offsets.values())):
        expected, expected_lse = dense(q[:, a:b], k[:, c:d], v[:, c:d], causal=True)
        np.testing.assert_allclose(out[:, a:b], expected, atol=1e-5)
        np.testing.assert_allclose(lse[:, a:b], expected_lse, atol=4 * LEVELS["fp32"])
    tiles, predicted = sparge.predict(q, k, causal=True, tau=1.0, **offsets)
    assert tiles.shape == (4, 4, 2, 5) and tiles.sum() == predicted.qk_tiles["computed"] == stats.qk_tiles["computed"]
    many = list(range(301))  # a map of 300 sequences is larger than that of one
    tiles, _ = sparge.predict(q, k[:, :300], q_offsets=many, kv_offsets=many, select="all", pv_skip="off")
    assert tiles.shape == (300, 4, 1, 1) and tiles.all()


def test_calibration_is_kept():
    q, k, v, causal = read_head("smollm2-local")
    made = []
    for threads in (1, 2):
        calibration = sparge.Calibration(2, target_l1=0.05, seed=7)
        for _ in range(2):
            out = sparge.attention(q, k, v, causal=causal, calibration=calibration, threads=threads)
        made.append((calibration.save(), [calibration.head(h) for h in range(2)], out.tobytes()))
    assert made[0] == made[1]  # the same seed: the same choices, for any number of threads
    for copy in (pickle.loads(pickle.dumps(calibration)), sparge.Calibration.load(calibration.save(), 2)):
        assert copy.save() == calibration.save() and copy.heads == 2 and copy.head(1) == calibration.head(1)
        again = [sparge.attention(q, k, v, causal=causal, calibration=c) for c in (copy, pickle.loads(pickle.dumps(calibration)))]
        assert again[0].tobytes() == again[1].tobytes()
    beforehand = sparge.Calibration(2, target_l1=0.05)
    sparge.calibrate(q, k, v, beforehand, causal=causal)
    assert beforehand.head(0).samples > 0


@pytest.mark.parametrize(
    "given, error, text",
    [
        (dict(heads="x"), TypeError, "heads='x' is no int"),
        (dict(seed=-1), ValueError, "seed=-1 is outside 0..2^63-1"),
        (dict(seed=2**63), ValueError, "seed=9223372036854775808 is outside 0..2^63-1"),
        (dict(seed=1.5), TypeError, "seed=1.5 is no int"),
        (dict(target_l2="x"), TypeError, "target_l2='x' is no float"),
        (dict(pv_l1=[0.1]), TypeError, "pv_l1=[0.1] is no float"),
    ],
    ids=str,
)
def test_a_calibration_names_what_is_wrong(given, error, text):
    with pytest.raises(error) as caught:
        sparge.Calibration(**{"heads": 2, **given})
    assert str(caught.value) == text


@pytest.mark.parametrize("options", [dict(target_l1=0), dict(tau=0.9), dict(precision="int16", select="all"), dict()], ids=str)
def test_threads_do_not_change_a_byte(options):
    q, k, v = qkv((1, 4, 700, 64), (1, 2, 1100, 64))
    one, two = (sparge.attention(q, k, v, causal=True, threads=threads, **options).tobytes() for threads in (1, 2))
    assert one == two


# ------------------------------------------------------------------ behaviour


def test_the_gil_is_released():
    """This thread gets on during a call of another one. On a busy machine it may have no turn in many of them."""
    q, k, v = qkv(*[(4, 2500, 64)] * 2)
    calls, enough = [0], threading.Event()
    deadline = time.monotonic() + PATIENCE_S

    def compute():
        while not enough.is_set() and time.monotonic() < deadline:
            calls[0] += 1
            sparge.attention(q, k, v, target_l1=0, threads=1)

    thread = threading.Thread(target=compute)
    thread.start()
    call, steps = 0, 0
    while steps <= 3 and thread.is_alive():  # of dozens; none, or one, if the call held the lock
        time.sleep(0.001)
        call, steps = calls[0], steps + 1 if calls[0] == call else 0
    enough.set()
    thread.join()
    assert steps > 3


def test_several_threads_at_once():
    q, k, v = qkv((4, 400, 64), (2, 400, 64))
    expected = sparge.attention(q, k, v, causal=True, target_l1=0).tobytes()
    calibration = sparge.Calibration(4)
    wrong = []

    def compute():
        for _ in range(5):
            wrong.extend([1] * int(sparge.attention(q, k, v, causal=True, target_l1=0).tobytes() != expected))
            out = sparge.attention(q, k, v, causal=True, calibration=calibration)
            wrong.extend([2] * int(relative_l1(out, np.frombuffer(expected, np.float32).reshape(q.shape)) > 0.1))

    threads = [threading.Thread(target=compute) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_can_compute():
    q, k, v = qkv(*[(4, 600, 64)] * 2)
    expected = sparge.attention(q, k, v, threads=2).tobytes()  # the pool's threads are there
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)  # a hang ends the child
        os._exit(0 if sparge.attention(q, k, v, threads=2).tobytes() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sparge.attention(q, k, v, threads=2).tobytes() == expected


def test_no_memory_is_lost():
    q, mask = noise(1, 2, 4, 16), np.ones((4, 4), bool)
    calibration = sparge.Calibration(2)

    def calls(count):
        for _ in range(count):
            sparge.attention(q, q, q, mask=mask, return_lse=True, return_stats=True, calibration=calibration)
            sparge.attention(q[..., ::2], q[..., ::2], q)
            with pytest.raises(ValueError):
                sparge.attention(q, q, q, tau=2.0)

    calls(1000)
    before = resident()
    calls(3500)  # 10,500 calls
    assert resident() - before < 3 * 2**20  # 300 bytes per call


def test_overhead_of_a_call():
    q = noise(1, 1, 1, 16)
    calibration = sparge.Calibration(1)
    for options in ({}, dict(target_l1=0, causal=True), dict(calibration=calibration)):
        # The best of many short rounds: on a busy machine some of them are not interrupted.
        best = float("inf")
        for _ in range(400):
            begin = time.perf_counter()
            for _ in range(20):
                sparge.attention(q, q, q, **options)
            best = min(best, (time.perf_counter() - begin) / 20)
            if best < 20e-6:
                break
        assert best < 20e-6


def test_import_is_light():
    code = "import sys, sparge; sparge.Preset, sparge.Calibration; assert not {'torch', 'transformers', 'diffusers'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=PATIENCE_S).returncode == 0


def test_everything_public_is_annotated():
    functions = [getattr(sparge, name) for name in sparge.__all__ if inspect.isfunction(getattr(sparge, name))]
    functions += [f for _, f in inspect.getmembers(sparge.Calibration, inspect.isfunction)]
    assert len(functions) > 10
    for function in functions:
        for name, parameter in inspect.signature(function).parameters.items():
            assert name == "self" or parameter.annotation is not inspect.Parameter.empty, (function, name)
        assert "return" in function.__annotations__, function


def test_number_of_threads():
    before = sparge.get_num_threads()
    try:
        sparge.set_num_threads(3)
        assert sparge.get_num_threads() == 3
    finally:
        sparge.set_num_threads(0)
    assert sparge.get_num_threads() == before or before != os.cpu_count()
