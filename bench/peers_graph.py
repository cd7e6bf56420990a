"""Peers that compile a graph of one node: ONNX Runtime and OpenVINO."""

import numpy as np

from peers import Run


class OnnxPeer:
    """com.microsoft MultiHeadAttention: as fast as the ONNX Attention-23 operator on one thread, faster on two."""

    def __init__(self):
        import onnx
        import onnxruntime

        self.onnx, self.runtime = onnx, onnxruntime
        self.version = onnxruntime.__version__

    def open(self, case, inputs, who):
        helper, kind = self.onnx.helper, self.onnx.TensorProto.FLOAT
        width = case.heads * case.dim
        shapes = {"q": [1, case.queries, width], "k": [1, case.keys, width], "v": [1, case.keys, width]}
        node = helper.make_node("MultiHeadAttention", list("qkv"), ["o"], domain="com.microsoft",
                                num_heads=case.heads, unidirectional=int(case.causal))
        graph = helper.make_graph(
            [node], "attention", [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()],
            [helper.make_tensor_value_info("o", kind, shapes["q"])])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        session = self.runtime.InferenceSession(model.SerializeToString(), self.options(case.threads),
                                                providers=["CPUExecutionProvider"])
        return self.bind(session, inputs, shapes)

    def options(self, threads):
        options = self.runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take the other core from whoever is measured next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options

    def bind(self, session, inputs, shapes):
        def flat(x):  # (heads, tokens, dim) to (1, tokens, heads * dim)
            return np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(1, x.shape[1], -1)

        binding = session.io_binding()
        heads, queries, dim = inputs.q.shape
        values = {name: self.runtime.OrtValue.ortvalue_from_numpy(flat(getattr(inputs, name))) for name in "qkv"}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        result = self.runtime.OrtValue.ortvalue_from_numpy(np.zeros(shapes["q"], np.float32))
        binding.bind_ortvalue_output("o", result)
        return Run(lambda: session.run_with_iobinding(binding),
                   lambda: result.numpy().reshape(queries, heads, dim).transpose(1, 0, 2), values.clear)


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
