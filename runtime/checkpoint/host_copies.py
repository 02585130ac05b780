"""Allocates the host copies of a rank's tensors, to which a save copies them.

Only pinned memory lets the device copy while the host goes on. torch's allocator of pinned memory
rounds each request up to a power of two (ATen/core/CachingHostAllocator.h), so that a tensor of
1.1 GB would take 2 GB of the host for the rest of the run. So the copies share a few buffers whose
sizes are powers of two, and little is lost. (The allocator's option pinned_max_round_threshold_mb
would do the same, but a torch that does not know an option refuses to start.)

    tensors   ▆▆▆▆▆▆▆▆▆▆ ▆▆▆▆▆▆ ▆▆▆▆▆ ▆▆▆▆▆ ▆▆▆▆
    buffers   │▆▆▆▆▆▆▆▆▆▆ ▆▆▆▆▆▆            │▆▆▆▆▆ ▆▆▆▆▆ ▆▆▆▆│
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel.disk import ALIGNMENT, DiskMemory, aligned


def host_copies(tensors: Mapping[str, Tensor], folder: str = "") -> dict[str, Tensor]:
    """A tensor on the host for each of `tensors`, of its shape and dtype and with a storage of its
    own; pinned if that one is on a GPU. The contents are arbitrary. `folder`: they are in a file
    there, because the host's memory has no room for them."""
    if folder:
        file = DiskMemory(folder, sum(aligned(each.nbytes) for each in tensors.values()))
        return {name: file.new_zeros(each, each.shape) for name, each in tensors.items()}
    names, copies = list(tensors), {}
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    # at least one unit, so that a tensor without elements has a place too
    sizes = [max(ALIGNMENT, aligned(each.nbytes)) for each in tensors.values()]
    for size, members in power_of_two_buffers(sizes):
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu).numpy()
        begin = 0
        for member in members:
            tensor = tensors[names[member]]
            part = buffer[begin : begin + tensor.nbytes]
            # not a view of a torch tensor: DCP clones what is smaller than its storage
            copies[names[member]] = torch.from_numpy(part).view(tensor.dtype).view(tensor.shape)
            begin += sizes[member]
    return copies


def power_of_two_buffers(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Distribute pieces of `sizes` bytes over buffers: the size of each, a power of two, and the
    indices of the pieces in it.

    Each buffer is as large as the remaining pieces together, rounded down, and takes the largest
    pieces that still fit. Only the last one, or one for a single large piece, is rounded up.
    """
    waiting = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    buffers: list[tuple[int, list[int]]] = []
    while waiting:
        total, largest = sum(sizes[i] for i in waiting), sizes[waiting[0]]
        size = max(1 << (total.bit_length() - 1), 1 << (largest - 1).bit_length())
        room, taken = size, set()
        for i in waiting:
            if sizes[i] <= room:
                room -= sizes[i]
                taken.add(i)
        buffers.append((size, sorted(taken)))
        waiting = [i for i in waiting if i not in taken]
    return buffers
