"""OpenVINO: sparse attention in its language models, as an operation of its own: the trial of docs/studies/openvino.md.

    import openvino_genai, openvino_attention as so         # this file's folder is in PYTHONPATH

    so.convert("model", "model-sparge")                     # once: a folder as OpenVINO GenAI reads it
    pipe = openvino_genai.LLMPipeline("model-sparge", "CPU", extensions=[so.Attention], ATTENTION_BACKEND="SDPA")
    print(pipe.generate(prompt, max_new_tokens=50))
    print(so.summary())                                     # calls, time, tiles skipped

A model that you compile yourself (openvino.Core, optimum-intel): `so.patch(model)` before it is compiled. How exact: `so.configure(target_l2=0.02)`
before the model runs. Models must be causal over all their tokens, which is tried before anything is replaced.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any, Union

import numpy as np
import openvino
from openvino import opset13

from sparge._layers import Layer, Settings
from sparge._layers import summary as _summary

__all__ = ["Attention", "configure", "convert", "layers", "patch", "summary"]

_FAR = 20000  # keys that a window or a chunk would hide from the last query
_NEAR = 70
_STATE = "sparge_state_"
_settings = Settings()
_layers: dict[str, Layer] = {}
_lock = threading.Lock()


def configure(**settings: Any) -> None:
    """How exact the layers of all models are from now on (sparge.torch.Settings); what they learned is forgotten."""
    global _settings
    chosen = Settings(**settings)
    with _lock:
        _settings = chosen
        _layers.clear()


def layers() -> dict[str, Layer]:
    """The layers that ran, by the names of the operations that they stand for."""
    return dict(_layers)


def summary() -> str:
    """A table of them, as sparge.torch.summary."""
    return _summary(_layers.values())


def _layer(name: str) -> Layer:
    with _lock:
        if name not in _layers:
            _layers[name] = Layer(name, _settings)
        return _layers[name]


class Attention(openvino.Op):  # type: ignore[misc]
    """Inputs: q (batch, heads, queries, size), k and v (batch, fewer heads or as many, keys, size), the model's attention_mask. It is
    what `extensions=` of a pipeline, or `core.add_extension`, wants to know."""

    def __init__(self, inputs: Any = None, layer: str = "", scale: float = 0.0) -> None:
        super().__init__(self, inputs) if inputs is not None else super().__init__(self)
        self._layer_name, self._scale = layer, scale
        if inputs is not None:
            self.constructor_validate_and_infer_types()

    def validate_and_infer_types(self) -> None:
        q, v = self.get_input_partial_shape(0), self.get_input_partial_shape(2)
        shape = [q[0], q[1], q[2], v[3]]
        self.set_output_type(0, self.get_input_element_type(0), openvino.PartialShape(shape))

    def clone_with_new_inputs(self, inputs: Any) -> Attention:
        return Attention(inputs, self._layer_name, self._scale)

    def visit_attributes(self, visitor: Any) -> bool:
        attributes: dict[str, Any] = {"layer": self._layer_name, "scale": self._scale}
        visitor.on_attributes(attributes)
        self._layer_name, self._scale = attributes["layer"], attributes["scale"]
        return True

    def has_evaluate(self) -> bool:
        return True

    def evaluate(self, outputs: Any, inputs: Any) -> bool:
        q, k, v, there = (tensor.data for tensor in inputs)
        if there.shape[-1] != k.shape[2] or not there.all():
            raise NotImplementedError(f"sparge: attention_mask {there.shape} hides tokens, or is not of the {k.shape[2]} keys: batches of one prompt only")
        outputs[0].shape = (*q.shape[:3], v.shape[3])
        _layer(self._layer_name).attention(q, k, v, causal=True, scale=self._scale, out=outputs[0].data)
        return True


def _ungrouped(value: Any) -> Any:
    """Keys or values before they were repeated for the query heads."""
    node = value.get_node()
    if node.get_type_name() == "Reshape" and node.input_value(0).get_node().get_type_name() == "Broadcast":
        unsqueeze = node.input_value(0).get_node().input_value(0).get_node()
        if unsqueeze.get_type_name() == "Unsqueeze":
            return unsqueeze.input_value(0)
    return value


def _scale_of(attention: Any) -> float:
    """The factor of its scores."""
    if attention.get_input_size() < 5:
        return 1 / math.sqrt(attention.get_input_partial_shape(0)[3].get_length())
    node = attention.input_value(4).get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant":
        raise NotImplementedError(f"{attention.get_friendly_name()}: its scale is no constant")
    return float(node.data.reshape(-1)[0])


def _alone(model: Any, mask: Any) -> Any:
    """A model that computes this mask of `model` only, with inputs in place of states."""
    copy = model.clone()
    name, index = mask.get_node().get_friendly_name(), mask.get_index()
    node = next(node for node in copy.get_ordered_ops() if node.get_friendly_name() == name)
    parameters, seen, open_nodes = [], set(), [node]
    while open_nodes:
        part = open_nodes.pop()
        if part.get_friendly_name() in seen:
            continue
        seen.add(part.get_friendly_name())
        if part.get_type_name() == "ReadValue":
            state = opset13.parameter(part.get_output_partial_shape(0), part.get_output_element_type(0), name=_STATE + part.get_friendly_name())
            part.output(0).replace(state.output(0))
            parameters.append(state)
        elif part.get_type_name() == "Parameter":
            parameters.append(part)
        else:
            open_nodes += [value.get_node() for value in part.input_values()]
    return openvino.Model([opset13.result(node.output(index))], parameters, "mask")


def _inputs(compiled: Any, queries: int, keys: int) -> list[Any]:
    """For the last `queries` of so many tokens, in the order of its inputs."""
    given = []
    for port in compiled.inputs:
        name = port.get_any_name()
        if port.get_node().get_friendly_name().startswith(_STATE):
            shape = [1 if side.is_dynamic else side.get_length() for side in port.get_partial_shape()]
            shape[2] = keys - queries
            value: Any = np.zeros(shape)
        elif name == "position_ids":
            value = np.arange(keys - queries, keys)[None]
        elif name == "beam_idx":
            value = np.zeros(1)
        elif name in ("attention_mask", "input_ids"):
            value = np.ones((1, keys if name == "attention_mask" else queries))
        else:
            raise NotImplementedError(f"the mask of this model depends on {name}, of which nothing is known here")
        given.append(value.astype(port.get_element_type().to_dtype()))
    return given


def _check_mask(model: Any, mask: Any) -> None:
    """Computes it for a short prompt and for a token after a long one: all tokens up to the query itself must be visible, and no other."""
    compiled = openvino.Core().compile_model(_alone(model, mask), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for queries, keys in ((_NEAR, _NEAR), (1, _FAR)):
        seen = compiled(_inputs(compiled, queries, keys))[0]
        hidden = ~seen if seen.dtype == bool else seen < -1e4  # -inf, or the least number of a type
        wanted = np.arange(keys)[None, :] > np.arange(keys - queries, keys)[:, None]
        if hidden.shape[-2:] != wanted.shape or (hidden != wanted).any():
            raise NotImplementedError("this model's mask is not causal over all its tokens: a window, or another structure")


def patch(model: Any) -> int:
    """Replaces the attention of an openvino.Model in place; how many there were. Refuses what it cannot compute, and then replaces
    nothing."""
    found = [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]
    if not found:
        raise ValueError("this model has no ScaledDotProductAttention: was it compiled for paged attention, or patched before?")
    there = [port for port in model.inputs if "attention_mask" in port.get_names()]
    if not there:
        raise NotImplementedError("this model has no input attention_mask: it is no language model as OpenVINO exports them")
    made = []
    masks = set()
    for node in found:
        if node.get_attributes().get("causal") or node.get_input_size() < 4:
            raise NotImplementedError(f"{node.get_friendly_name()} has no mask as an input")
        mask = node.input_value(3)
        if (mask.get_node().get_friendly_name(), mask.get_index()) not in masks:
            masks.add((mask.get_node().get_friendly_name(), mask.get_index()))
            _check_mask(model, mask)
        inputs = [node.input_value(0), _ungrouped(node.input_value(1)), _ungrouped(node.input_value(2)), there[0]]
        made.append(Attention(inputs, node.get_friendly_name(), _scale_of(node)))
    for node, attention in zip(found, made):
        attention.set_friendly_name(node.get_friendly_name() + "/sparge")
        node.output(0).replace(attention.output(0))
    model.validate_nodes_and_infer_types()
    return len(found)


def convert(folder: Union[str, os.PathLike[str]], to: Union[str, os.PathLike[str]]) -> int:
    """A copy of a model's folder (openvino_model.xml, tokenizers, configurations) with its attention replaced; how many there were. It
    needs this package wherever it runs."""
    source, target = Path(folder), Path(to)
    if not (source / "openvino_model.xml").is_file():
        raise FileNotFoundError(f"{source / 'openvino_model.xml'}: no such file")
    if target.exists():
        raise FileExistsError(f"{target} is there already")
    model = openvino.Core().read_model(source / "openvino_model.xml")
    count = patch(model)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, ignore=shutil.ignore_patterns("openvino_model.*", "*.gguf"))
    openvino.save_model(model, part / "openvino_model.xml", compress_to_fp16=False)
    part.rename(target)
    return count
