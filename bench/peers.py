"""Who is measured. A peer opens a case and gives back something to run; what it cannot do it refuses with a reason.

Every peer gets the data in the layout it likes best, outside the measured time."""

import logging
from dataclasses import dataclass

import numpy as np

import cases
import sparge_ctypes as sparge


class Missing(Exception):
    """This peer cannot be measured here; the text says why and goes into the report."""


@dataclass(frozen=True)
class Contestant:
    name: str  # as in tables and plots
    peer: str  # which Peer opens it
    mode: str  # precision of the arithmetic
    bound: float  # relative L1 above which the result is wrong
    dtype: str = "f32"  # inputs and output
    uses_map: bool = False  # False: computes a case with a map densely, as a yardstick
    threads: int = 0  # 0 = those of the case


# Bounds are several times what correct arithmetic gives (docs/numerics.md; 2^-8 and 2^-11 per rounding for 16 bits),
# and far below what a wrong mask, scale or layout gives.
OURS_BOUND = {"fp32": 1e-4, "int16": 1e-3, "int8": 4e-2}
INPUT_BOUND = {"f32": 0.0, "f16": 1e-2, "bf16": 1e-2}


def ours(mode, dtype="f32", threads=0):
    name = f"sparge {mode}" + (f", {dtype} input" if dtype != "f32" else "") + (f", on {threads}" if threads else "")
    return Contestant(name, "sparge", mode, max(OURS_BOUND[mode], INPUT_BOUND[dtype]), dtype, True, threads)


YARDSTICK = Contestant("torch fp32", "torch", "fp32", 1e-4)
TORCH_BF16 = Contestant("torch bf16", "torch", "bf16", 1e-2, "bf16")
TORCH_F16 = Contestant("torch f16", "torch", "f16", 1e-2, "f16")
FLEX = Contestant("FlexAttention fp32", "flex", "fp32", 1e-4, uses_map=True)
ONNX = Contestant("ONNX Runtime fp32", "onnxruntime", "fp32", 1e-4)
OPENVINO = Contestant("OpenVINO fp32", "openvino", "fp32", 1e-4)
# ggml adds up the values of one query in f16: 8e-3 at 4096 keys.
GGML = Contestant("ggml f16 K/V", "ggml", "f16", 2e-2)
OUR_MODES = tuple(ours(mode) for mode in ("fp32", "int16", "int8"))
DENSE_PEERS = (TORCH_BF16, ONNX, OPENVINO, GGML)
# Every name that may stand in a table, in the order of the table.
PEER_NAMES = ("torch", "flex", "onnxruntime", "openvino", "ggml")


def contestants(case, level):
    """Who takes part in a case; the yardstick always does."""
    if case.group == "scaling":
        return [YARDSTICK] + [ours(mode, threads=count) for mode in ("fp32", "int8") for count in (1, case.threads)]
    if case.group == "inputs":
        mine = [ours(mode, dtype) for mode in ("fp32", "int8") for dtype in ("f32", "f16", "bf16")]
        return [YARDSTICK, TORCH_F16, TORCH_BF16, *mine]
    if case.group == "dims":
        return [YARDSTICK, ours("fp32"), ours("int8")]
    if case.group == "kept" and case.kept not in cases.BAR_SHARES:
        return [YARDSTICK, FLEX, *OUR_MODES]  # dense peers do not change with the share
    flex = [FLEX] if flex_takes_part(case, level) else []
    return [YARDSTICK, *DENSE_PEERS, *flex, *OUR_MODES]


def flex_takes_part(case, level):
    """It compiles some 10 s per shape and thread count: in shorter runs it takes part where it is at home."""
    where = {"quick": ("kept",), "default": ("kept", "causal"), "full": ("kept", "causal", "dense")}[level]
    return case.group in where


class Run:
    """Something to time: `run()` computes, `output()` gives (heads, queries, dim) float32 of the last run."""

    def __init__(self, run, output, close=lambda: None, stages=None):
        self.run, self.output, self.close, self.stages = run, output, close, stages


class SpargePeer:
    def __init__(self, library_path):
        self.library = sparge.Library(library_path)
        self.contexts = {}
        self.version = self.library.version
        self.isa = self.context(1).isa

    def context(self, threads):
        if threads not in self.contexts:
            self.contexts[threads] = sparge.Context(self.library, threads)
        return self.contexts[threads]

    def open(self, case, inputs, who):
        convert = {"f32": lambda x: x, "f16": lambda x: x.astype(np.float16), "bf16": cases.bf16_bits}[who.dtype]
        q, k, v = (convert(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
        attention = sparge.Attention(self.context(who.threads or case.threads), q, k, v, who.mode, case.causal,
                                     inputs.map, dtype=sparge.BF16 if who.dtype == "bf16" else None)
        back = cases.from_bf16_bits if who.dtype == "bf16" else lambda x: x.astype(np.float32)
        return Run(attention.run, lambda: back(attention.output), attention.close, attention.stages_ms)


class TorchPeer:
    def __init__(self):
        import torch

        self.torch = torch
        self.version = torch.__version__

    def tensors(self, inputs, dtype):
        kind = {"f32": self.torch.float32, "bf16": self.torch.bfloat16, "f16": self.torch.float16}[dtype]
        return [self.torch.from_numpy(x)[None].to(kind) for x in (inputs.q, inputs.k, inputs.v)]

    def open(self, case, inputs, who):
        torch = self.torch
        torch.set_num_threads(case.threads)
        q, k, v = self.tensors(inputs, who.dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        last = {}

        def run():
            with torch.inference_mode():
                last["o"] = attend(q, k, v, is_causal=case.causal)

        return Run(run, lambda: last["o"][0].float().numpy())


class FlexPeer:
    """FlexAttention compiled by Inductor for the CPU, with a BlockMask of our 128 x 64 tiles."""

    def __init__(self):
        import torch
        from torch.nn.attention import flex_attention

        self.torch, self.flex = torch, flex_attention
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no GPU
        self.version = torch.__version__
        self.threads = None

    def open(self, case, inputs, who):
        torch = self.torch
        torch.set_num_threads(case.threads)
        if self.threads != case.threads:
            torch._dynamo.reset()  # compiled code has the number of threads built in
            self.threads = case.threads
        q, k, v = (torch.from_numpy(x)[None] for x in (inputs.q, inputs.k, inputs.v))
        mask = self.block_mask(case, inputs)
        compiled = torch.compile(self.flex.flex_attention, dynamic=False, fullgraph=True)
        last = {}

        def run():
            with torch.no_grad():
                last["o"] = compiled(q, k, v, block_mask=mask)

        return Run(run, lambda: last["o"][0].numpy())

    def block_mask(self, case, inputs):
        torch, block = self.torch, (cases.BLOCK_Q, cases.BLOCK_K)
        lengths = (case.queries, case.keys)
        if case.causal:
            return self.flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, *lengths, "cpu", BLOCK_SIZE=block)
        if inputs.map is None:
            return None
        kept = torch.from_numpy(inputs.map)[None]
        count = kept.sum(-1).to(torch.int32)
        order = torch.argsort(kept, dim=-1, descending=True, stable=True).to(torch.int32)
        # Kept tiles are "full" blocks: no mask function is evaluated inside them, which is the fastest it can do.
        none, nothing = torch.zeros_like(count), torch.zeros_like(order)
        return self.flex.BlockMask.from_kv_blocks(none, nothing, count, order, BLOCK_SIZE=block, seq_lengths=lengths,
                                                  compute_q_blocks=False)


def open_peers(library_path, ggml_folder, only=None):
    """All peers that work here, and the reason for each that does not: ({name: peer}, {name: reason})."""
    from peer_ggml import GgmlPeer
    from peers_graph import OnnxPeer, OpenVinoPeer

    makers = {"torch": TorchPeer, "flex": FlexPeer, "onnxruntime": OnnxPeer, "openvino": OpenVinoPeer,
              "ggml": lambda: GgmlPeer(ggml_folder)}
    found, missing = {"sparge": SpargePeer(library_path)}, {}
    for name, make in makers.items():
        if only is not None and name not in only:
            missing[name] = "left out by --peers"
            continue
        try:
            found[name] = make()
        except Exception as error:  # whatever a foreign package throws on import is a reason to report
            missing[name] = one_line(error)
    return found, missing


def one_line(error):
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
