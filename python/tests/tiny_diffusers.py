"""Tiny transformers of diffusers with random weights, and inputs for them; grids with odd sides."""

from __future__ import annotations

import math
from typing import Any, Callable

import diffusers
import torch
import torch.nn.functional as F

Inputs = dict[str, Any]
HEADS, DIM, TEXT, BATCH = 2, 16, 13, 2
INNER = HEADS * DIM


def seeded(model: torch.nn.Module, gain: float = 1.5) -> torch.nn.Module:
    """Random weights, larger than those of the constructor: attention shall matter, or the tests would not see it."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel()
            parameter.data.normal_(0, gain / math.sqrt(fan_in), generator=generator)
    return model.eval()


def normal(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def times(value: float = 500.0, batch: int = BATCH) -> torch.Tensor:
    return torch.full((batch,), value)


def text_mask() -> torch.Tensor:
    """The second prompt is shorter."""
    mask = torch.ones(BATCH, TEXT, dtype=torch.long)
    mask[1, 8:] = 0
    return mask


def flux(rows: int = 9, columns: int = 7) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=DIM, num_attention_heads=HEADS,
        joint_attention_dim=24, pooled_projection_dim=12, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    ids = torch.stack(torch.meshgrid(*(torch.arange(float(n)) for n in (1, rows, columns)), indexing="ij"), -1)
    return model, dict(
        hidden_states=normal(BATCH, rows * columns, 4), encoder_hidden_states=normal(BATCH, TEXT, 24),
        pooled_projections=normal(BATCH, 12), timestep=times(0.5), img_ids=ids.reshape(-1, 3),
        txt_ids=torch.zeros(TEXT, 3),
    )  # fmt: skip


def sd3() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=32, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=DIM, num_attention_heads=HEADS,
        joint_attention_dim=24, caption_projection_dim=INNER, pooled_projection_dim=12, pos_embed_max_size=32,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    return model, dict(
        hidden_states=normal(BATCH, 4, 18, 14), encoder_hidden_states=normal(BATCH, TEXT, 24),
        pooled_projections=normal(BATCH, 12), timestep=times(),
    )  # fmt: skip


def cogvideox() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=24, num_layers=2, sample_width=14, sample_height=10, sample_frames=9, max_text_seq_length=TEXT,
    )  # fmt: skip
    return model, dict(
        hidden_states=normal(BATCH, 3, 4, 10, 14), encoder_hidden_states=normal(BATCH, TEXT, 24), timestep=times()
    )


def mochi() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.MochiTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, num_layers=2, pooled_projection_dim=16, in_channels=4,
        text_embed_dim=24, time_embed_dim=8, max_sequence_length=TEXT,
    )  # fmt: skip
    return model, dict(
        hidden_states=normal(BATCH, 4, 3, 10, 14), encoder_hidden_states=normal(BATCH, TEXT, 24), timestep=times(),
        encoder_attention_mask=text_mask().bool(),
    )  # fmt: skip


def wan(frames: int = 3, height: int = 10, width: int = 14, batch: int = BATCH) -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip
    return model, dict(
        hidden_states=normal(batch, 4, frames, height, width), timestep=times(batch=batch),
        encoder_hidden_states=normal(batch, TEXT, 24),
    )  # fmt: skip


def hunyuan_video() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=DIM, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, guidance_embeds=False, text_embed_dim=24, pooled_projection_dim=12,
        rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return model, dict(
        hidden_states=normal(BATCH, 4, 3, 10, 14), timestep=times(), encoder_hidden_states=normal(BATCH, TEXT, 24),
        encoder_attention_mask=text_mask(), pooled_projections=normal(BATCH, 12),
    )  # fmt: skip


def ltx() -> tuple[torch.nn.Module, Inputs]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=HEADS, attention_head_dim=DIM, cross_attention_dim=INNER,
        num_layers=2, caption_channels=24,
    )  # fmt: skip
    return model, dict(
        hidden_states=normal(BATCH, 3 * 5 * 7, 4), encoder_hidden_states=normal(BATCH, TEXT, 24), timestep=times(),
        encoder_attention_mask=text_mask(), num_frames=3, height=5, width=7,
    )  # fmt: skip


Make = Callable[[], "tuple[torch.nn.Module, Inputs]"]
MODELS: list[Make] = [flux, sd3, cogvideox, mochi, wan, hunyuan_video, ltx]
def made(make: Make, **arguments: Any) -> tuple[torch.nn.Module, Inputs]:
    torch.manual_seed(0)  # biases and norms are the constructor's
    model, inputs = make(**arguments)
    return seeded(model), inputs


def attend_to_alike(model: torch.nn.Module, sharpness: float = 4.0) -> torch.nn.Module:
    """Keys are what queries are: tokens attend to those that are alike, as in trained models."""
    for block in model.blocks:
        attention = block.attn1
        attention.to_k.load_state_dict(attention.to_q.state_dict())
        attention.norm_q.weight.data.mul_(sharpness)
    return model


@torch.no_grad()
def run(model: torch.nn.Module, inputs: Inputs, **changed: Any) -> torch.Tensor:
    return model(**{**inputs, **changed}).sample


class Wrong(torch.overrides.TorchFunctionMode):
    """Every query attends to all keys alike: what a model makes of attention that is wrong."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, value = (args[i] if len(args) > i else kwargs[n] for i, n in ((0, "query"), (2, "value")))
            return value.mean(-2, keepdim=True).expand(*query.shape[:-1], value.shape[-1])
        return func(*args, **kwargs)


class Unknown(torch.nn.Module):
    """Of no known class, and attends without a processor."""

    config = {"rows": 5}

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(hidden_states, hidden_states, hidden_states, attn_mask=mask)
