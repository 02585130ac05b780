"""Which kernels compute attention in a run: its line at the start.

    attention: cuDNN 9.20.0
    attention: flash 2 (not flash 3: not installed)                      documents, windows, or cp
    attention: cuDNN 9.20.0 in 24 layers, flash 2 (not flash 3: not installed) in 24 layers
    attention: flash (CPU)

The rules are in model/kernels/attention_choice.py.
"""

from collections import Counter
from typing import Any

from costs.parameters import kinds_of_blocks
from model.kernels.attention_choice import Call, choose_for_steps, made_ready, this_device
from settings.config import Config


class _Asked:
    """Stands for the positions of a batch (model/positions.py) and notes which masks a layer asks
    for."""

    def __init__(self) -> None:
        self.masks: list[tuple[int | None, int, str]] = []

    def angles(self, *_: Any) -> None: ...

    def mask(self, *asked: Any) -> None:
        self.masks.append(asked)  # (window, head_dim, kernel)


def describe_attention(config: Config, device_type: str) -> str:
    """The line that a run logs at its start: the kernels that are chosen for the calls of attention
    in a step on this machine's "cpu" or "cuda". With cp, those calls are of chunks that do not
    begin a sequence. Raises UserError if the wanted kernel cannot run."""
    train, found = config.train, Counter[str]()
    dtype, device = config.precision.compute, this_device(device_type)
    for block, layers in kinds_of_blocks(config.model):
        asked = _Asked()
        block.attention.inputs(asked)
        for window, head_dim, wanted in asked.masks:
            packed = config.data.document_mask or (window or train.seq_len) < train.seq_len
            packed |= config.parallel.cp > 1  # a chunk of queries, and more keys (mask.py)
            call = Call(dtype, head_dim, train.seq_len, packed, train.deterministic)
            choice = choose_for_steps(device, call, wanted)
            made_ready(choice)  # raises if flash 3 is installed, but torch cannot load it
            found[str(choice)] += layers
    if len(found) > 1:
        return "attention: " + ", ".join(f"{text} in {n} layers" for text, n in found.items())
    return f"attention: {next(iter(found), 'of its own kind')}"  # of a kind that asks for no mask
