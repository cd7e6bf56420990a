"""Context parallelism of diffusers: its ring and its Ulysses call us for what a rank computes, and join the results."""

from __future__ import annotations

from typing import Any, Callable

import torch

from .. import torch as _torch
from .._layers import Layer


def attend(dispatch: Any, layer: Callable[[], Layer], arguments: dict[str, Any], config: Any) -> Any:
    """A call of the dispatcher under context parallelism, tokens before heads. `layer`: that of the module that runs."""

    def part(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
        return_lse: bool = False, _save_ctx: bool = True, _parallel_config: Any = None,
    ) -> Any:  # fmt: skip
        return _part(layer(), query, key, value, attn_mask, dropout_p, scale, return_lse)

    return dispatch._templated_context_parallel_attention(
        **arguments, forward_op=part, backward_op=_no_backward, _parallel_config=config
    )


def _part(
    layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    scale: float | None, return_lse: bool,
) -> Any:  # fmt: skip
    """Some keys (ring) or some heads (Ulysses). Tokens stay in raster order: what is here is no grid."""
    if mask is not None:
        raise ValueError("attn_mask: not for attention backend 'sparge' under context parallelism")
    if dropout > 0:
        raise ValueError(f"dropout_p={dropout}: not for attention backend 'sparge' under context parallelism")
    result = layer.attention(
        query, key, value, layout="NHD", scale=scale, return_lse=return_lse, threads=torch.get_num_threads()
    )
    if not return_lse:
        return result
    out, lse = result
    return out, lse.transpose(1, 2).contiguous()


def _no_backward(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("attention backend 'sparge' computes no gradients")


def apply(transformer: Any, config: Any) -> Callable[[], None]:
    """Makes a transformer on the CPU run under context parallelism, and gives what undoes it. `enable_parallelism` of
    diffusers does the same for accelerators, and refuses CPUs."""
    import torch.distributed as dist
    from diffusers import ParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("parallel: torch.distributed has no process group; call torch.distributed.init_process_group first")
    degrees, ranks = (config.ring_degree, config.ulysses_degree), dist.get_world_size()
    if degrees[0] * degrees[1] != ranks:
        raise ValueError(f"parallel: ring_degree={degrees[0]} times ulysses_degree={degrees[1]} is not the {ranks} ranks there are")
    plan = getattr(transformer, "_cp_plan", None)
    if plan is None:
        raise ValueError(f"parallel: {type(transformer).__name__} has no plan for context parallelism (_cp_plan)")
    if getattr(transformer, "_parallel_config", None) is not None:
        raise ValueError(f"parallel: this {type(transformer).__name__} runs in parallel already")
    device = next(transformer.parameters()).device
    if device.type != "cpu":
        raise ValueError(f"parallel: the transformer is on {device}; there, call its enable_parallelism")
    whole = ParallelConfig(context_parallel_config=config)
    whole.setup(dist.get_rank(), ranks, torch.device("cpu"), mesh=_mesh_of(degrees))
    processors = [getattr(module, "processor", None) for module in transformer.modules()]
    processors = [p for p in processors if hasattr(p, "_parallel_config")]

    def undo() -> None:
        try:
            remove_context_parallel(transformer, plan)
        finally:
            for owner in (transformer, *processors):
                owner._parallel_config = None

    try:
        for owner in (transformer, *processors):
            owner._parallel_config = whole
        apply_context_parallel(transformer, config, plan)
    except BaseException:
        undo()
        raise
    return undo


_meshes: dict[tuple[int, int], tuple[Any, Any]] = {}  # by degrees: the group of all ranks, and the mesh of it


def _mesh_of(degrees: tuple[int, int]) -> Any:
    """One for each pair of degrees, because a mesh makes groups that nobody destroys before PyTorch's own are."""
    import torch.distributed as dist

    world = dist.group.WORLD
    if degrees not in _meshes or _meshes[degrees][0] is not world:
        _meshes[degrees] = world, dist.device_mesh.init_device_mesh("cpu", degrees, mesh_dim_names=("ring", "ulysses"))
    return _meshes[degrees][1]


def current_layer(otherwise: Layer) -> Layer:
    return _torch.current_layer() or otherwise
