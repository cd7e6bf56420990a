"""relative error of the final latents of a video denoiser, after all its steps

The model is a WanTransformer3DModel: a folder of one, or (default) a small one with random weights whose keys equal its
queries, so that tokens attend to those like themselves. Latents are smooth in time and space, and noise; steps are Euler's.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from ._common import Failed, progress, said, say, set_threads, settings, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="random", help="folder of a WanTransformer3DModel, or random (default)")
    parser.add_argument("--grid", default="5,30,44", help="tokens T,H,W; default 5,30,44")
    parser.add_argument("--steps", type=int, default=6, help="denoising steps; default 6")
    parser.add_argument("--dense-steps", type=int, default=0, help="first steps that are computed in full; default 0")
    parser.add_argument("--seed", type=int, default=0, help="of weights and latents")


def _model(name: str, seed: int) -> Any:
    try:
        from diffusers import WanTransformer3DModel
    except ImportError:
        raise Failed("diffusers is missing: pip install diffusers") from None
    if name != "random":
        return WanTransformer3DModel.from_pretrained(name).eval()
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=64, in_channels=8, out_channels=8, text_dim=32,
        freq_dim=32, ffn_dim=512, num_layers=4, qk_norm="rms_norm_across_heads",
    )  # fmt: skip
    with torch.no_grad():
        for block in model.blocks:
            block.attn1.to_k.load_state_dict(block.attn1.to_q.state_dict())
            block.attn1.norm_q.weight.mul_(3)  # sharper than random weights are by themselves
    return model.eval()


def _latents(model: Any, grid: list[int], seed: int) -> torch.Tensor:
    """A few smooth waves per channel, and a tenth of noise: (1, channels, T, H, W)."""
    make = torch.Generator().manual_seed(seed)
    patch = model.config.patch_size
    sides = [n * p for n, p in zip(grid, patch)]
    places = torch.stack(torch.meshgrid(*(torch.linspace(0, 1, n) for n in sides), indexing="ij"))
    waves = torch.randn(model.config.in_channels, 6, 3, generator=make) * 6
    phase = torch.rand(model.config.in_channels, 6, generator=make) * 6.3
    angle = torch.einsum("cwx,xthy->cwthy", waves, places) + phase[:, :, None, None, None]
    noise = torch.randn(model.config.in_channels, *sides, generator=make)
    return (angle.sin().mean(1) * 2 + 0.1 * noise)[None]


@torch.inference_mode()
def denoise(model: Any, latents: torch.Tensor, steps: int, title: str) -> torch.Tensor:
    """Euler steps from t = 1 to 0; the model gives the velocity."""
    text = torch.zeros(1, 8, model.config.text_dim)
    for i in progress(range(steps), title):
        t = 1 - i / steps
        velocity = model(latents, torch.tensor([1000 * t]), text, return_dict=False)[0]
        latents = latents - velocity / steps
    return latents


def run(options: argparse.Namespace) -> dict[str, Any]:
    try:
        grid = [int(side) for side in options.grid.split(",")]
    except ValueError:
        grid = []
    if len(grid) != 3 or min(grid) < 1:
        raise Failed(f"--grid {options.grid}: is not T,H,W")
    if options.steps < 1 or options.dense_steps < 0:
        raise Failed(f"--steps {options.steps} or --dense-steps {options.dense_steps} is too small")
    set_threads(options)
    model = _model(options.model, options.seed)
    from sparge._layers import Totals
    from sparge.integrations import diffusers as integration

    latents = _latents(model, grid, options.seed)
    begin = time.perf_counter()
    dense = denoise(model, latents, options.steps, "dense")
    dense_s = time.perf_counter() - begin
    with integration.enable(model, dense_steps=options.dense_steps, **settings(options)) as enabled:
        begin = time.perf_counter()
        sparse = denoise(model, latents, options.steps, "sparse")
        sparse_s = time.perf_counter() - begin
    total = Totals()
    for layer in enabled.layers.values():
        total.add(layer.totals)
    error = ((sparse - dense).abs().sum() / dense.abs().sum()).item()
    rows = [("attention", "seconds", "faster", "relative L1", "sparsity"), ("dense", f"{dense_s:.2f}", "", "", ""),
            ("sparse", f"{sparse_s:.2f}", f"{dense_s / sparse_s:.2f}x", f"{error:.4f}", f"{total.sparsity:.1%}")]  # fmt: skip
    say(table(rows))
    return {"verb": "denoise", "model": options.model, "grid": grid, "steps": options.steps, "dense_steps": options.dense_steps,
            **said(options), "dense_s": dense_s, "sparse_s": sparse_s, "relative_l1": error,
            "sparsity": total.sparsity}  # fmt: skip
