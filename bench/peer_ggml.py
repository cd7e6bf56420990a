"""ggml's flash attention (GGML_OP_FLASH_ATTN_EXT on its CPU backend) through ctypes, with f16 K/V as llama.cpp does."""

import ctypes as c
import math
from pathlib import Path

import numpy as np

from peers import Missing, Run

TYPE_F32, TYPE_F16 = 0, 1
MASK_ROWS = 64  # ggml once asked for mask rows in multiples of this, and still takes them


class InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


class GgmlPeer:
    def __init__(self, folder):
        if folder is None or not Path(folder, "libggml-cpu.so").exists():
            raise Missing("ggml was not built (see bench/README.md)")
        self.base = c.CDLL(str(Path(folder, "libggml-base.so")), mode=c.RTLD_GLOBAL)
        self.cpu = c.CDLL(str(Path(folder, "libggml-cpu.so")))
        self._declare()
        self.version = self.base.ggml_version().decode()
        self.backend = self.cpu.ggml_backend_cpu_init()

    def _declare(self):
        pointer, size, long = c.c_void_p, c.c_size_t, c.c_int64
        shapes = {
            "ggml_version": (c.c_char_p, []),
            "ggml_init": (pointer, [InitParams]),
            "ggml_free": (None, [pointer]),
            "ggml_tensor_overhead": (size, []),
            "ggml_graph_overhead": (size, []),
            "ggml_new_tensor_4d": (pointer, [pointer, c.c_int, long, long, long, long]),
            "ggml_flash_attn_ext": (pointer, [pointer] * 5 + [c.c_float] * 3),
            "ggml_new_graph": (pointer, [pointer]),
            "ggml_build_forward_expand": (None, [pointer, pointer]),
            "ggml_backend_alloc_ctx_tensors": (pointer, [pointer, pointer]),
            "ggml_backend_buffer_free": (None, [pointer]),
            "ggml_backend_tensor_set": (None, [pointer, pointer, size, size]),
            "ggml_backend_tensor_get": (None, [pointer, pointer, size, size]),
            "ggml_backend_graph_compute": (c.c_int, [pointer, pointer]),
        }
        for name, (result, arguments) in shapes.items():
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_backend_cpu_init.restype = pointer
        self.cpu.ggml_backend_cpu_set_n_threads.argtypes = [pointer, c.c_int]

    def open(self, case, inputs, who):
        base = self.base
        memory = 16 * base.ggml_tensor_overhead() + base.ggml_graph_overhead()
        context = base.ggml_init(InitParams(memory, None, True))

        def tensor(array, kind):  # ggml counts dimensions from the innermost
            shape = array.shape[::-1] + (1,) * (4 - array.ndim)
            return base.ggml_new_tensor_4d(context, kind, *shape)

        arrays = [inputs.q, inputs.k.astype(np.float16), inputs.v.astype(np.float16)]
        tensors = [tensor(arrays[0], TYPE_F32), tensor(arrays[1], TYPE_F16), tensor(arrays[2], TYPE_F16)]
        if case.causal:  # ggml knows no causal flag: llama.cpp gives a mask, too
            arrays.append(causal_mask(case))
            tensors.append(tensor(arrays[3], TYPE_F16))
        mask = tensors[3] if case.causal else None
        result = base.ggml_flash_attn_ext(context, *tensors[:3], mask, 1 / math.sqrt(case.dim), 0.0, 0.0)
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, result)
        buffer = base.ggml_backend_alloc_ctx_tensors(context, self.backend)
        for target, array in zip(tensors, arrays):
            array = np.ascontiguousarray(array)
            base.ggml_backend_tensor_set(target, array.ctypes.data, 0, array.nbytes)
        return self._run(case, graph, result, lambda: (base.ggml_backend_buffer_free(buffer), base.ggml_free(context)))

    def _run(self, case, graph, result, close):
        def run():
            # The backend is shared by all cases, its thread count is not.
            self.cpu.ggml_backend_cpu_set_n_threads(self.backend, case.threads)
            if self.base.ggml_backend_graph_compute(self.backend, graph) != 0:
                raise RuntimeError("ggml_backend_graph_compute failed")

        def output():  # ggml gives (queries, heads, dim)
            values = np.empty((case.queries, case.heads, case.dim), np.float32)
            self.base.ggml_backend_tensor_get(result, values.ctypes.data, 0, values.nbytes)
            return values.transpose(1, 0, 2)

        return Run(run, output, close)


def causal_mask(case):
    rows = -(-case.queries // MASK_ROWS) * MASK_ROWS
    hidden = np.arange(case.keys)[None, :] > np.arange(rows)[:, None] + case.keys - case.queries
    return np.where(hidden, np.float16(-np.inf), np.float16(0))
