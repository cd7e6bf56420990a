"""The research package's functions, computed by sparge on the CPU (sparge.compat)."""

from sparge.compat import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
    spas_sage_attn_meansim_cuda,
    spas_sage_attn_meansim_topk_cuda,
)

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]
