"""The C ABI of sparge (include/sparge/sparge.h) through ctypes: structs as they stand there, and one class to run."""

import ctypes as c
import math

import numpy as np

BLOCK_Q, BLOCK_K = 128, 64
F32, F16, BF16 = 0, 1, 2
FP32, INT16, INT8 = 0, 1, 2
SELECT_ALL, SELECT_CDF, SELECT_TOPK, SELECT_MAP = 0, 1, 2, 3
PRECISIONS = {"fp32": FP32, "int16": INT16, "int8": INT8}
STAGES = ("pack", "predict", "schedule", "kernel")


class ContextDesc(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("threads", c.c_int32), ("executor", c.c_void_p), ("isa", c.c_char_p),
                ("device", c.c_char_p)]


class HeadParams(c.Structure):
    _fields_ = [(name, c.c_double) for name in ("theta", "tau", "topk", "pv_skip")]


class PlanDesc(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        *[(name, c.c_int64) for name in ("batch", "q_heads", "kv_heads", "q_tokens", "kv_tokens", "qk_dim", "v_dim")],
        ("q_offsets", c.c_void_p),
        ("kv_offsets", c.c_void_p),
        ("scale", c.c_double),
        ("softcap", c.c_double),
        ("causal", c.c_int32),
        ("query_offset", c.c_int64),
        ("window", c.c_int64),
        ("mask", c.c_int),
        ("alibi_slopes", c.c_void_p),
        ("sink_logits", c.c_void_p),
        ("precision", c.c_int),
        ("select", c.c_int),
        ("keep_sink", c.c_int32),
        ("params", HeadParams),
        ("heads", c.c_void_p),
        ("predictor", c.c_int),
        ("head_precision", c.c_void_p),
        ("calibration", c.c_void_p),
        ("grid", c.c_int64 * 3),
        ("text_tokens", c.c_int64),
        ("text_after", c.c_int32),
        ("dense_tail", c.c_int64),
        ("cache_tokens", c.c_int64),
        ("least_effort", c.c_double),
        *[(name, c.c_int64) for name in ("first_query", "all_queries", "first_key", "all_keys")],
        ("decode", c.c_int32),
        ("glance", c.c_int32),
    ]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", c.c_int)] + [
        (name, c.c_int64) for name in ("batch_stride", "head_stride", "token_stride")]


class Mask(c.Structure):
    _fields_ = [("data", c.c_void_p)] + [(name, c.c_int64) for name in ("batch_stride", "head_stride", "query_stride")]


class Lse(c.Structure):
    _fields_ = [("data", c.c_void_p), ("batch_stride", c.c_int64), ("head_stride", c.c_int64)]


class HeadStats(c.Structure):
    _fields_ = [(name, c.c_int64) for name in ("qk_eligible", "qk_computed", "pv_eligible", "pv_computed")]


class Stats(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("total", HeadStats),
        ("group_rows", c.c_int32),
        ("threads", c.c_int32),
        ("isa", c.c_char_p),
        *[(f"{name}_ms", c.c_double) for name in ("total", *STAGES, "calibrate")],
        ("key_blocks", c.c_int64),
        ("key_blocks_reused", c.c_int64),
    ]


class RunArgs(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        *[(name, Tensor) for name in "qkvo"],
        ("mask", Mask),
        ("map", c.c_void_p),
        ("map_batch_stride", c.c_int64),
        ("map_head_stride", c.c_int64),
        ("lse", Lse),
        ("map_out", c.c_void_p),
        ("stats", c.c_void_p),
        ("head_stats", c.c_void_p),
        ("workspace", c.c_void_p),
        ("workspace_size", c.c_size_t),
        ("mass_out", c.c_void_p),
        ("pv_out", c.c_void_p),
        ("cache", c.c_void_p),
        ("cache_size", c.c_size_t),
        # For parts of a larger call, which nobody measures here.
        *[(name, c.c_void_p) for name in ("pool_lse_out", "pool_lse", "key_survey_out", "key_survey", "pool_rows_out", "pool_counts_out",
                                          "pool_rows", "pool_counts")],
        ("stream", c.c_void_p),
    ]


INIT = {ContextDesc: "sparge_context_desc_init_sized", PlanDesc: "sparge_plan_desc_init_sized",
        RunArgs: "sparge_run_args_init_sized", Stats: "sparge_stats_init_sized"}
CALLS = ("sparge_context_create", "sparge_plan_create", "sparge_run", "sparge_reference")


class Library:
    """libsparge.so with typed functions; a failed call raises RuntimeError with the library's own line."""

    def __init__(self, path):
        self.path = str(path)
        self.dll = c.CDLL(self.path)
        for name in ("sparge_version", "sparge_last_error", "sparge_context_isa"):
            getattr(self.dll, name).restype = c.c_char_p
        self.dll.sparge_context_isa.argtypes = [c.c_void_p]
        self.dll.sparge_context_destroy.argtypes = self.dll.sparge_plan_destroy.argtypes = [c.c_void_p]
        for name in ("workspace", "cache"):
            size = getattr(self.dll, f"sparge_plan_{name}_size")
            size.argtypes, size.restype = [c.c_void_p], c.c_size_t
        self.dll.sparge_plan_create.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p]
        self.dll.sparge_run.argtypes = self.dll.sparge_reference.argtypes = [c.c_void_p, c.c_void_p]
        self.version = self.dll.sparge_version().decode()

    def init(self, struct):
        """A struct as its initialiser leaves it. The library may know a longer one than this module does (public structs
        only grow), and is told how long this one is."""
        made = struct()
        getattr(self.dll, INIT[struct])(c.byref(made), c.c_size_t(c.sizeof(struct)))
        return made

    def call(self, name, *args):
        if getattr(self.dll, name)(*args) != 0:
            raise RuntimeError(f"{name}: {self.dll.sparge_last_error().decode()}")


class Context:
    def __init__(self, library, threads, isa=None, device=None):
        self.library = library
        desc = library.init(ContextDesc)
        desc.threads = threads
        desc.isa = isa.encode() if isa else None
        desc.device = device.encode() if device else None
        self.handle = c.c_void_p()
        library.call("sparge_context_create", c.byref(desc), c.byref(self.handle))
        self.isa = library.dll.sparge_context_isa(self.handle).decode()

    def close(self):
        self.library.dll.sparge_context_destroy(self.handle)
        self.handle = None


def view(array, dtype=None):
    """A (heads, tokens, dim) array, innermost stride 1. NumPy has no bf16: give uint16 bits and dtype=BF16."""
    if dtype is None:
        dtype = {"float32": F32, "float16": F16}[array.dtype.name]
    size = array.itemsize
    return Tensor(array.ctypes.data, dtype, 0, array.strides[0] // size, array.strides[1] // size)


class Attention:
    """One plan with its workspace and output, ready to run again and again: q, k, v are (heads, tokens, dim)."""

    def __init__(self, context, q, k, v, precision, causal=False, block_map=None, topk=None, dtype=None):
        self.library, self.context = context.library, context
        self.keep = (q, k, v, block_map)  # ctypes holds addresses only
        desc = self.library.init(PlanDesc)
        desc.batch, desc.q_heads, desc.kv_heads = 1, q.shape[0], k.shape[0]
        desc.q_tokens, desc.kv_tokens, desc.qk_dim, desc.v_dim = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        desc.causal = int(causal)
        desc.precision = PRECISIONS[precision]
        desc.select = SELECT_MAP if block_map is not None else SELECT_TOPK if topk is not None else SELECT_ALL
        # Speed must come from the tiles that were named, so nothing else may be skipped or kept.
        desc.params.pv_skip = math.inf
        if topk is not None:
            desc.params.topk, desc.params.theta = topk, -1.0
        self.plan = c.c_void_p()
        self.library.call("sparge_plan_create", context.handle, c.byref(desc), c.byref(self.plan))
        self.workspace_bytes = self.library.dll.sparge_plan_workspace_size(self.plan)
        self.workspace = np.empty(self.workspace_bytes + 64, np.uint8)
        self.output = np.empty((q.shape[0], q.shape[1], v.shape[2]), q.dtype)
        self.stats = self.library.init(Stats)
        self.args = self._arguments(q, k, v, block_map, dtype)

    def _arguments(self, q, k, v, block_map, dtype):
        args = self.library.init(RunArgs)
        args.q, args.k, args.v, args.o = view(q, dtype), view(k, dtype), view(v, dtype), view(self.output, dtype)
        if block_map is not None:
            args.map = block_map.ctypes.data
            args.map_head_stride = block_map.strides[0]
        args.stats = c.addressof(self.stats)
        start = self.workspace.ctypes.data
        args.workspace = start + -start % 64
        args.workspace_size = self.workspace_bytes
        return args

    def run(self):
        self.library.call("sparge_run", self.plan, c.byref(self.args))

    def reference(self):
        """The library's own oracle, in double precision, into the same output."""
        self.library.call("sparge_reference", self.plan, c.byref(self.args))

    def stages_ms(self):
        return {name: getattr(self.stats, f"{name}_ms") for name in STAGES}

    def kept(self):
        return self.stats.total.qk_computed / max(1, self.stats.total.qk_eligible)

    def close(self):
        self.library.dll.sparge_plan_destroy(self.plan)
        self.plan = None
