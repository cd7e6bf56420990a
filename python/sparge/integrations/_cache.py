"""A cache for transformers whose keys and values stay where they are."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM = 256  # tokens


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values with room behind them: what comes is written there, and nothing else is moved until the room is
    full. Then it is doubled. `keys` and `values` are views of the filled part; whoever replaces them (beam search does, and
    selecting sequences) has them copied into new room with the next token."""

    def __init__(self, tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._tokens = tokens  # that are expected
        self._rooms: list[torch.Tensor | None] = [None, None]  # of keys, of values: (batch, heads, tokens, dim)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = (key_states, value_states)
        # Gradients need what was, not what is written over it; and a graph cannot look at where a tensor lies.
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(states.requires_grad for states in new)):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = (self._append(i, kept, states) for i, (kept, states) in enumerate(zip(self._kept(), new)))
        return self.keys, self.values

    def _kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _append(self, which: int, kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The tokens that are kept and the new ones after them, in one tensor."""
        if kept.dim() < new.dim():  # as lazy_initialization makes it: nothing is kept yet
            kept = new[:, :, :0]
        filled, all_tokens = kept.shape[2], kept.shape[2] + new.shape[2]
        if (*kept.shape[:2], kept.shape[3]) != (*new.shape[:2], new.shape[3]):  # else one sequence would be written to all
            raise ValueError(f"cache: {tuple(new.shape)} cannot follow {tuple(kept.shape)} (batch, heads, tokens, dim)")
        room = self._rooms[which]
        if room is None or not _fits(room, kept, new):
            tokens = max(self._tokens, 2 * all_tokens, _LEAST_ROOM) if all_tokens > self._tokens else self._tokens
            kind = torch.promote_types(kept.dtype, new.dtype)
            room = torch.empty((*new.shape[:2], tokens, new.shape[3]), dtype=kind, device=new.device)
            room[:, :, :filled] = kept
            self._rooms[which] = room
        room[:, :, filled:all_tokens] = new
        return room[:, :, :all_tokens]

    def reset(self) -> None:
        super().reset()
        self._rooms = [None, None]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have the tokens, without the room."""
        kept = {name: getattr(self, name) for name in ("keys", "values")}
        copies = {name: tensor if tensor is None else tensor.clone() for name, tensor in kept.items()}
        return {**self.__dict__, **copies, "_rooms": [None, None]}


def _fits(room: torch.Tensor, kept: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether `kept` is the beginning of `room`, and `new` may be written behind it."""
    filled = kept.shape[2]
    writable = torch.is_inference_mode_enabled() or not room.is_inference()
    enough = filled + new.shape[2] <= room.shape[2] and torch.promote_types(room.dtype, new.dtype) == room.dtype
    return writable and enough and kept.is_set_to(room[:, :, :filled])


class Cache(DynamicCache):  # type: ignore[misc]
    """A transformers.DynamicCache that does not copy all keys and values for every token:
    `model.generate(ids, past_key_values=Cache(model.config))`.

    Layers with a sliding window, and those without keys, are transformers' own. After `crop`, the next tokens are written
    over those that were removed, also in what earlier updates returned.
    """

    layers: list[Any]
    layer_class_to_replicate: Any

    def __init__(self, config: PreTrainedConfig | None = None, tokens: int = 0) -> None:
        """tokens: as many as will come, prompt and answer, if that is known; with more, it grows by doubling."""
        if tokens < 0:
            raise ValueError(f"tokens={tokens} is negative")
        super().__init__(config=config)
        if self.layer_class_to_replicate is None:
            self.layers = [RoomyLayer(tokens) if type(layer) is DynamicLayer else layer for layer in self.layers]
        else:
            self.layer_class_to_replicate = functools.partial(RoomyLayer, tokens)
