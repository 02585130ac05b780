"""Which kernels compute attention in a run: its line at the start, and the check that they run.

    attention: cuDNN 9.20.0
    attention: flash 2 (not flash 3: not installed)                      documents, windows, or cp
    attention: cuDNN 9.20.0 in 24 layers, flash 2 (not flash 3: not installed) in 24 layers
    attention: flash (CPU)

The rules are in model/kernels/attention_choice.py.
"""

from collections import Counter
from typing import Any

import torch

from errors import UserError
from model.kernels.attention_choice import KEY, Call, Choice, choose, made_ready, this_device
from model.mask import Mask, scores_bias
from model.transformer import kinds_of_blocks
from training.config import Config
from training.precision import Precision

TRIAL_HEADS, TRIAL_LENGTH = 2, 256


class _Asked:
    """Stands for the positions of a batch (model/positions.py) and notes which masks a layer asks
    for."""

    def __init__(self) -> None:
        self.masks: list[tuple[int | None, int, str]] = []

    def angles(self, *_: Any) -> None: ...

    def mask(self, *asked: Any) -> None:
        self.masks.append(asked)  # (window, head_dim, kernel)


def choices(config: Config, device_type: str) -> Counter[tuple[Call, Choice]]:
    """The calls of attention in a run on this machine's "cpu" or "cuda", each with the kernel that
    is chosen for it, and the number of layers. Raises UserError if the wanted kernel cannot run."""
    train, found = config.train, Counter[tuple[Call, Choice]]()
    for block, layers in kinds_of_blocks(config.model):
        asked = _Asked()
        block.attention.inputs(asked)
        for window, head_dim, wanted in asked.masks:
            packed = config.data.document_mask or (window or train.seq_len) < train.seq_len
            packed |= config.parallel.cp > 1  # a chunk of queries, and more keys (mask.py)
            dtype = Precision.of(config).compute
            call = Call(dtype, head_dim, head_dim, train.seq_len, packed, train.deterministic)
            found[call, choose(this_device(device_type), call, wanted)] += layers
    return found


def describe_attention(config: Config, device_type: str) -> str:
    """The line that a run logs at its start."""
    layers = Counter[str]()
    for (_, choice), count in choices(config, device_type).items():
        layers[str(choice)] += count
    if not layers:  # a kind of attention that asks for no mask
        return "attention: of its own kind"
    if len(layers) == 1:
        return f"attention: {next(iter(layers))}"
    return "attention: " + ", ".join(f"{text} in {n} layers" for text, n in layers.items())


def check_attention(config: Config, device_type: str) -> None:
    """Run the chosen kernels once, forward and backward, on one short sequence; on a CPU only
    choose. Raises UserError if one fails: a later failure would be in the first step, inside the
    model."""
    for call, choice in choices(config, device_type):
        if device_type == "cuda":
            try_out(call, choice, device_type)


def try_out(call: Call, choice: Choice, device_type: str) -> None:
    """Run a kernel once, forward and backward. Raises UserError if it fails."""
    kernel = made_ready(choice)
    length = min(call.length, TRIAL_LENGTH)
    options: dict[str, Any] = {"dtype": call.dtype, "device": device_type}
    positions = torch.arange(length, device=device_type).unsqueeze(1)
    mask = Mask(dense=kernel.run)
    if call.packed and kernel.packs:
        mask = Mask(packed=True, window=length)
    elif call.packed:
        mask = Mask(bias=scores_bias(positions, call.dtype), dense=kernel.run)
    q, k, v = (
        torch.zeros((length, 1, TRIAL_HEADS, call.head_dim), **options).requires_grad_()
        for _ in range(3)
    )
    try:
        mask(q, k, v).sum().backward()
        if device_type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        why = f"this kernel fails on this machine: {str(error).partition(chr(10))[0]}"
        remedy = f"choose another one with {KEY}, for example flash2"
        raise UserError(KEY, choice.kernel.name, why, remedy) from error
