"""Keys and values of the tokens that a model has seen, so that the next token costs the work of one
and not of all.

A batch of prompts is padded on the left: then the last token of each is in the same slot, and so is
every later one.

    slot          0    1    2    3    4  │  5  …
    row 0         ·    ·   the  cat  sat │ on  …       · is padding
    row 1         in   the  be  gin ning │ was …
    positions     0    0    0    1    2  │  3  …       of row 0
                  0    1    2    3    4  │  5  …       of row 1

Every row is computed as if it were alone. Its positions count from its own first token, and what
lies before that is hidden from it, for `document_mask`'s rule holds here too: at position p a token
sees itself and the p tokens before it. A padding token, which sees itself, is computed for nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig
from model.document import document_mask
from model.rotary import rotary_angles


class LayerCache:
    """One layer's keys, already turned by their positions, and values, of this tp rank's key/value
    heads.

    Args:
        shape: (slots, B, K/tp, E); one head where K < tp.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.filled = 0  # slots

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [S, B, K/tp, E] of the next S tokens → those of all tokens so far, as views
        [filled, B, K/tp, E]."""
        begin, self.filled = self.filled, self.filled + k.shape[0]
        self.keys[begin : self.filled] = k
        self.values[begin : self.filled] = v
        return self.keys[: self.filled], self.values[: self.filled]


class KeyValueCache:
    """Room for a batch's prompts and what follows them: 2 · layers · slots · B · max(1, K/tp) · E
    numbers on each tp rank.

    Args:
        prompt_lengths: tokens of each prompt, [B] numbers. The first tokens that come are the
            prompts, padded on the left to the longest of them; after that they come one by one.
        new_tokens: how many will come after the prompts, at most.
        dtype: of the model's activations.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp_size: int,
        prompt_lengths: Sequence[int],
        new_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        slots = max(prompt_lengths) + new_tokens
        shape = (
            slots,
            len(prompt_lengths),
            max(1, config.num_kv_heads // tp_size),
            config.head_dim,
        )
        self.layers = {
            str(layer): LayerCache(shape, dtype, device) for layer in range(config.num_layers)
        }

        padding = max(prompt_lengths) - torch.tensor(prompt_lengths, device=device)  # [B]
        slot = torch.arange(slots, device=device).unsqueeze(1)
        self._has_padding = len(set(prompt_lengths)) > 1
        # [slots, B], or [slots, 1] where all rows count alike; cosines and sines [slots, B or 1, 1,
        # E/2]
        self._positions = (slot - padding).clamp(min=0) if self._has_padding else slot
        self._cos, self._sin = rotary_angles(
            self._positions, config.head_dim, config.rope_theta, dtype, config.rope_scaling
        )
        # [B, 1, 1, slots], what any token after the prompts sees of the slots up to its own
        hidden = (slot < padding).T[:, None, None]
        self._bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(
            hidden, float("-inf")
        )

    def next(self, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the next `length` tokens, before any layer appends them: cosines, sines, and the mask
        that `attend` wants."""
        begin = self.layers["0"].filled
        assert length == 1 or begin == 0, "prompts come first and at once, later tokens one by one"
        tokens = slice(begin, begin + length)
        mask = None
        if self._has_padding:
            mask = (
                document_mask(self._positions[tokens], self._bias.dtype)
                if begin == 0
                else self._bias[..., : begin + 1]
            )
        return self._cos[tokens], self._sin[tokens], mask
