"""Peers that compile a graph of one node: ONNX Runtime and OpenVINO."""

import numpy as np

from peers import Run


class OnnxPeer:
    """ONNX Runtime has three attention operators, and each is the fastest somewhere (one thread, d=64, milliseconds):

    causal, N=2048: MultiHeadAttention 44, Attention-23 47, GroupQueryAttention 28
    dense, N=2048: MultiHeadAttention 16.5, Attention-23 17.6 (on two threads 9.1 and 11.6)
    1 query, 4096 keys, 8 heads: MultiHeadAttention 2.6, Attention-23 0.9"""

    def __init__(self):
        import onnx
        import onnxruntime

        self.onnx, self.runtime = onnx, onnxruntime
        self.version = onnxruntime.__version__

    def open(self, case, inputs, who):
        if case.queries == 1:
            feeds = {name: np.ascontiguousarray(getattr(inputs, name)[None]) for name in "qkv"}
            return self.bind(case, self.node("Attention", "qkv", is_causal=int(case.causal)), feeds)
        feeds = {name: flat(getattr(inputs, name)) for name in "qkv"}
        if not case.causal:
            return self.bind(case, self.node("MultiHeadAttention", "qkv", "com.microsoft", num_heads=case.heads), feeds)
        # The two empty names are a cache of earlier keys and values: there is none.
        names = ["q", "k", "v", "", "", "last", "total"]
        feeds |= {"last": np.array([case.keys - 1], np.int32), "total": np.array(case.keys, np.int32)}
        node = self.node("GroupQueryAttention", names, "com.microsoft", ["o", "cache_k", "cache_v"],
                         num_heads=case.heads, kv_num_heads=case.heads)
        return self.bind(case, node, feeds)

    def node(self, operator, inputs, domain="", outputs=("o",), **attributes):
        return self.onnx.helper.make_node(operator, list(inputs), list(outputs), domain=domain, **attributes)

    def bind(self, case, node, feeds):
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        kind_of = {np.dtype(np.float32): kinds.FLOAT, np.dtype(np.int32): kinds.INT32}
        results = {name: np.zeros(feeds["q"].shape if name == "o" else (1, case.heads, case.keys, case.dim), np.float32)
                   for name in node.output}
        described = [[helper.make_tensor_value_info(name, kind_of[array.dtype], array.shape)
                      for name, array in arrays.items()] for arrays in (feeds, results)]
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "attention", *described)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        session = self.runtime.InferenceSession(model.SerializeToString(), self.options(case.threads),
                                                providers=["CPUExecutionProvider"])
        binding, value = session.io_binding(), self.runtime.OrtValue.ortvalue_from_numpy
        held = {name: value(array) for name, array in (feeds | results).items()}
        for name in feeds:
            binding.bind_ortvalue_input(name, held[name])
        for name in results:
            binding.bind_ortvalue_output(name, held[name])

        def output():
            array = held["o"].numpy()
            return array[0] if array.ndim == 4 else array.reshape(case.queries, case.heads, case.dim).transpose(1, 0, 2)

        return Run(lambda: session.run_with_iobinding(binding), output, held.clear)

    def options(self, threads):
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take the other core from whoever is measured next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options


def flat(array):
    """(heads, tokens, dim) to (1, tokens, heads * dim)"""
    return np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(1, array.shape[1], -1)


class OpenVinoPeer:
    def __init__(self):
        import openvino
        from openvino import opset13

        self.openvino, self.ops = openvino, opset13
        self.core = openvino.Core()
        self.version = openvino.__version__.split("-")[0]

    def open(self, case, inputs, who):
        tensors = [np.ascontiguousarray(x[None]) for x in (inputs.q, inputs.k, inputs.v)]
        parameters = [self.ops.parameter(list(x.shape), dtype=np.float32) for x in tensors]
        attention = self.ops.scaled_dot_product_attention(*parameters, causal=case.causal)
        model = self.openvino.Model([attention.output(0)], parameters, "attention")
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": case.threads, "NUM_STREAMS": 1,
                    "PERFORMANCE_HINT": "LATENCY",
                    # A pinned main thread would stay pinned while other libraries are measured.
                    "ENABLE_CPU_PINNING": False}
        request = self.core.compile_model(model, "CPU", settings).create_infer_request()
        for index, tensor in enumerate(tensors):
            request.set_input_tensor(index, self.openvino.Tensor(tensor, shared_memory=True))
        return Run(request.infer, lambda: request.get_output_tensor(0).data[0], tensors.clear)
