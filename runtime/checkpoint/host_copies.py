"""Allocates the host copies of a rank's tensors, to which a save copies them.

Only pinned memory lets the device copy while the host goes on. torch's allocator of pinned memory
rounds each request up to a power of two (ATen/core/CachingHostAllocator.h), so that a tensor of
1.1 GB would take 2 GB of the host for the rest of the run. So the copies share a few buffers whose
sizes are powers of two, and little is lost. (The allocator's option pinned_max_round_threshold_mb
would do the same, but a torch that does not know an option refuses to start.)

    tensors   ▆▆▆▆▆▆▆▆▆▆ ▆▆▆▆▆▆ ▆▆▆▆▆ ▆▆▆▆▆ ▆▆▆▆
    buffers   │▆▆▆▆▆▆▆▆▆▆ ▆▆▆▆▆▆            │▆▆▆▆▆ ▆▆▆▆▆ ▆▆▆▆│
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from parallel.disk import ALIGNMENT, DiskMemory, aligned


def host_copies(tensors: Mapping[str, Tensor], folder: str = "") -> dict[str, Tensor]:
    """A tensor on the host for each of `tensors`, of its shape and dtype; pinned if that one is on
    a GPU. The contents are arbitrary. `folder`: they are in a file there, because the host's memory
    has no room for them."""
    if folder:
        file = DiskMemory(folder, sum(aligned(each.nbytes) for each in tensors.values()))
        return {name: file.new_zeros(each, each.shape) for name, each in tensors.items()}
    copies: dict[str, Tensor] = {}
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    # at least one unit, so that a tensor without elements has a place too
    sizes = {name: max(ALIGNMENT, aligned(each.nbytes)) for name, each in tensors.items()}
    left, room = sum(sizes.values()), 0  # bytes of tensors without a place, and of the buffer
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # the largest first
        tensor, size = tensors[name], sizes[name]
        if size > room:
            # all that is left, rounded down; up only for what would not fit
            room = max(1 << (left.bit_length() - 1), 1 << (size - 1).bit_length())
            buffer = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        part = buffer[len(buffer) - room :][: tensor.nbytes]
        copies[name] = part.view(tensor.dtype).view(tensor.shape)
        left, room = left - size, room - size
    return copies
