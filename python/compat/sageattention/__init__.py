"""SageAttention's function, computed by sparge on the CPU (sparge.compat)."""

from sparge.compat import sageattn

__all__ = ["sageattn"]
