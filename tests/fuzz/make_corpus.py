#!/usr/bin/env python3
"""Writes the seed corpus of the fuzzers: ok_* must be read, bad_* must be refused (io_test checks both)."""
import json
import pathlib
import struct

HERE = pathlib.Path(__file__).resolve().parent / "corpus"


def npy(header, data=b"", version=1, length=None):
    text = header.encode() if isinstance(header, str) else header
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + text + data


def head(descr="<f4", order="False", shape="(2, 3)"):
    return "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }\n" % (descr, order, shape)


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2, 3), begin=0, end=24):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


NPY = {
    "ok_f4": npy(head(), bytes(24)),
    "ok_f2_v2": npy(head("<f2"), bytes(12), version=2),
    "ok_u1_v3": npy(head("|u1"), bytes(6), version=3),
    "ok_b1": npy(head("|b1"), bytes(6)),
    "ok_scalar": npy(head(shape="()"), bytes(4)),
    "ok_empty": npy(head(shape="(0, 3)")),
    "ok_fortran_1d": npy(head(order="True", shape="(5,)"), bytes(20)),
    "bad_fortran": npy(head(order="True"), bytes(24)),
    "bad_big_endian": npy(head(">f4"), bytes(24)),
    "bad_dtype": npy(head("<f8"), bytes(48)),
    "bad_structured": npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", bytes(4)),
    "bad_truncated_data": npy(head(), bytes(23)),
    "bad_trailing": npy(head(), bytes(25)),
    "bad_truncated_header": npy(head(), length=500),
    "bad_header_length": npy(head(), bytes(24), version=2, length=0xFFFFFFFF),
    "bad_negative": npy(head(shape="(-1, 3)"), bytes(24)),
    "bad_overflow_product": npy(head(shape="(4611686018427387904, 4)")),
    "bad_overflow_behind_zero": npy(head(shape="(0, 9223372036854775807, 9223372036854775807)")),
    "bad_overflow_dim": npy(head(shape="(99999999999999999999,)")),
    "bad_nine_dims": npy(head(shape="(1, 1, 1, 1, 1, 1, 1, 1, 1)"), bytes(4)),
    "bad_repeated_key": npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (), }", bytes(4)),
    "bad_no_shape": npy("{'descr': '<f4', 'fortran_order': False}", bytes(4)),
    "bad_no_quote": npy("{'descr"),
    "bad_magic": b"\x93NUMPZ\x01\x00",
    "bad_version": npy(head(), bytes(24), version=9),
    "bad_nothing": b"",
}

SAFETENSORS = {
    "ok_one": safetensors({"q": entry()}, bytes(24)),
    "ok_metadata": safetensors({"__metadata__": {"causal": "true"}, "q": entry("BF16", end=12)}, bytes(12)),
    "ok_types": safetensors({"a": entry("U8", end=6), "b": entry("BOOL", end=6), "c": entry("F16", end=12)}, bytes(12)),
    "ok_unknown_dtype": safetensors({"q": entry("I64", (3,))}, bytes(24)),
    "ok_none": safetensors({}),
    "ok_padded": safetensors(b'{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   ', bytes(4)),
    "bad_short": b"\x01\x00",
    "bad_length_cap": safetensors(b"{}", length=1 << 62),
    "bad_length_file": safetensors(b"{}", length=3),
    "bad_json": safetensors(b'{"q":'),
    "bad_utf8": safetensors(b'{"\xff":1}'),
    "bad_not_object": safetensors(b"[1]"),
    "bad_nesting": safetensors(b"[" * 200),
    "bad_duplicate": safetensors(b'{"q":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"q":{}}'),
    "bad_duplicate_inside": safetensors(b'{"q":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "bad_outside": safetensors({"q": entry()}, bytes(23)),
    "bad_backwards": safetensors({"q": entry(begin=24, end=0)}, bytes(24)),
    "bad_huge_offset": safetensors({"q": entry(begin=(1 << 63) - 8, end=(1 << 63) - 1)}, bytes(24)),
    "bad_size": safetensors({"q": entry(shape=(2, 2))}, bytes(24)),
    "bad_overflow": safetensors({"q": entry(shape=(1 << 40, 1 << 40))}, bytes(24)),
    "bad_negative": safetensors({"q": entry(shape=(-2, -3))}, bytes(24)),
    "bad_float_dim": safetensors({"q": entry(shape=(2.0, 3))}, bytes(24)),
    "bad_metadata": safetensors({"__metadata__": {"causal": True}}),
    "bad_no_offsets": safetensors({"q": {"dtype": "F32", "shape": [1]}}),
}


def preset(change=None, **top):
    """A good preset of one layer with a sparse and a dense head; `change` edits it, `top` replaces fields."""
    measured = {"sparsity": 0.5, "work": 0.5, "error": 0.04, "pv_error": 0.05, "round_l1": 0.01, "verified_on": 1}
    sparse = {"head": 0, "precision": "int8", "select": "floor", "theta": 0.3, "tau": 0.9, "pv_skip": 8.5,
              "measured": measured}
    dense = {"head": 1, "precision": "int16", "select": "all", "theta": 0.0, "tau": 1, "pv_skip": "off",
             "measured": {**measured, "sparsity": 0, "work": 1, "error": 0, "pv_error": 0}}
    layer = {"q_heads": 2, "kv_heads": 1, "qk_dim": 64, "v_dim": 32, "causal": True, "samples": ["a"],
             "held_out": ["b"], "heads": [sparse, dense]}
    whole = {"format": "sparge-preset", "version": 3, "made_by": "corpus",
             "bounds": {"target_l2": 0.05, "pv_l2": 0.06, "round_l1": 0.05}, "predictor": "keys", "seed": 7,
             "layers": {"layer.0": layer}}
    if change:
        change(whole, layer, sparse)
    return json.dumps({**whole, **top}).encode()


L1 = {"target_l1": 0.05, "pv_l1": 0.06, "round_l1": 0.05}
LOSS = {"loss": 0.005, "measured_loss": 0.0047}


def version_2():
    """As it was written before there was a second measure."""
    old = preset(version=2, bounds=L1)
    return old.replace(b'"error"', b'"l1"').replace(b'"pv_error"', b'"pv_l1"')


def version_1():
    """As it was written before bounds and errors had the names of the library."""
    old = version_2().replace(b'"version": 2', b'"version": 1')
    return old.replace(b'"target_l1"', b'"l1"').replace(b'"pv_l1"', b'"l2"')


PRESET = {
    "ok_one": preset(),
    "ok_version_1": version_1(),
    "ok_version_2": version_2(),
    "ok_l1": preset(bounds=L1),
    "ok_loss": preset(bounds=LOSS),
    "ok_no_layers": preset(layers={}),
    "ok_partial": preset(partial={"options": "o", "captures": "c"}),
    "ok_paper": preset(predictor="paper"),
    "ok_largest_seed": preset(seed=(1 << 64) - 1),
    "bad_nothing": b"",
    "bad_json": preset()[:-1],
    "bad_list": b"[]",
    "bad_format": preset(format="preset"),
    "bad_names": preset(version=1),
    "bad_version": preset(version=4),
    "bad_two_measures": preset(bounds={**L1, "target_l2": 0.05}),
    "bad_loss_zero": preset(bounds={**LOSS, "loss": 0}),
    "bad_loss_negative": preset(bounds={**LOSS, "measured_loss": -0.001}),
    "bad_loss_not_measured": preset(bounds={"loss": 0.005}),
    "bad_loss_and_target": preset(bounds={**LOSS, "target_l2": 0.05}),
    "bad_loss_of_version_2": version_2().replace(json.dumps(L1).encode(), json.dumps(LOSS).encode()),
    "bad_version_text": preset(version="3"),
    "bad_nesting": b"[" * 200,
    "bad_utf8": preset(made_by="?").replace(b"?", b"\xff"),
    "bad_duplicate": preset().replace(b'"seed": 7', b'"seed": 7, "seed": 7'),
    "bad_unknown_field": preset(color="red"),
    "bad_seed": preset(seed=-1),
    "bad_bounds": preset(bounds={"target_l2": 0.05, "pv_l2": "small", "round_l1": 0.05}),
    "bad_layers": preset(layers=[]),
    "bad_head_count": preset(lambda whole, layer, head: layer["heads"].pop()),
    "bad_head_order": preset(lambda whole, layer, head: layer["heads"].reverse()),
    "bad_head_missing_tau": preset(lambda whole, layer, head: head.pop("tau")),
    "bad_tau": preset(lambda whole, layer, head: head.update(tau=1.5)),
    "bad_theta_huge": preset(lambda whole, layer, head: head.update(theta=0)).replace(b'"theta": 0,', b'"theta": 1e999,'),
    "bad_dense_skip": preset(lambda whole, layer, head: head.update(select="all", tau=1)),
    "bad_kv_heads": preset(lambda whole, layer, head: layer.update(kv_heads=3)),
    "bad_dim": preset(lambda whole, layer, head: layer.update(qk_dim=577)),
    "bad_samples": preset(lambda whole, layer, head: layer.update(samples=[1])),
    "bad_not_measured": preset(lambda whole, layer, head: head["measured"].update(verified_on=0)),
}



def calibration(
    magic=b"spargeC4", heads=1, grid=64 + 1000 * 8 + 1000000 * 14, measure=1, numbers=(0.0,) * 6350, choice=(0,) * 7
):
    """What src/calibrate/saved.cc saves: header, then per head its numbers and its choice."""
    head = struct.pack("<%dd7i" % len(numbers), *numbers, *choice)
    return magic + struct.pack("<QQQQQd", heads, 7, 3, grid, measure, 0.05) + head * min(heads, 4)


CALIBRATION = {
    "ok_new": calibration(),
    "ok_two": calibration(heads=2),
    "ok_chosen": calibration(numbers=(0.02, 0.025) + (1.5,) * 6348, choice=(1, 2, 30, 5, 2, 30, 1)),
    "ok_l1": calibration(measure=0),
    "bad_magic": calibration(magic=b"spargeC0"),
    "bad_heads": calibration(heads=9),
    "bad_grid": calibration(grid=1),
    "bad_measure": calibration(measure=2),
    "bad_nan": calibration(numbers=(float("nan"),) * 6350),
    "bad_choice": calibration(choice=(0, 8, 0, 0, 0, 0, 0)),
    "bad_short": calibration()[:100],
}


def kind(q_heads=1, kv_heads=1, qk_dim=64, v_dim=64, causal=1, most_queries=512, saved=b"", length=None):
    """One kind of call of a layer, with its calibration."""
    length = len(saved) if length is None else length
    return struct.pack("<6qQ", q_heads, kv_heads, qk_dim, v_dim, causal, most_queries, length) + saved


def layer(*kinds, magic=b"spargeL2", measure=1, bounds=(0.03, 0.0375, 0.05), seed=0, count=None):
    """What src/layer/saved.cc writes: header, then the kinds."""
    header = magic + struct.pack("<Q3dQQ", measure, *bounds, seed, len(kinds) if count is None else count)
    return header + b"".join(kinds)


LAYER = {
    "ok_new": layer(),
    "ok_dense": layer(kind(), kind(causal=0), kind(q_heads=32, kv_heads=8, v_dim=576)),
    "ok_calibrated": layer(kind(causal=0), kind(saved=calibration())),
    "bad_magic": layer(magic=b"spargeL0"),
    "bad_bounds": layer(bounds=(0.02, 0.025, 0.05)),
    "bad_measure": layer(measure=0),
    "bad_seed": layer(seed=1),
    "bad_count": layer(kind(), count=2),
    "bad_many": layer(count=(1 << 64) - 1),
    "bad_trailing": layer(kind(), count=0),
    "bad_twice": layer(kind(), kind()),
    "bad_heads": layer(kind(q_heads=0)),
    "bad_groups": layer(kind(q_heads=4, kv_heads=3)),
    "bad_dim": layer(kind(qk_dim=577)),
    "bad_causal": layer(kind(causal=2)),
    "bad_queries": layer(kind(most_queries=-1)),
    "bad_length": layer(kind(length=(1 << 64) - 1)),
    "bad_other_measure": layer(kind(saved=calibration(measure=0))),
    "bad_other_heads": layer(kind(q_heads=2, saved=calibration())),
    "bad_calibration": layer(kind(saved=calibration()[:100])),
    "bad_short": layer()[:55],
    "bad_nothing": b"",
}

FOLDERS = {"calibration": CALIBRATION, "layer": LAYER, "npy": NPY, "preset": PRESET, "safetensors": SAFETENSORS}
for folder, files in FOLDERS.items():
    (HERE / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (HERE / folder / name).write_bytes(content)
