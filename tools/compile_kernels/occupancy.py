"""How many programs of a kernel a multiprocessor holds at once, and how many bytes its threads need
to have in flight.

Occupancy is computed as NVIDIA's occupancy calculator does (CUDA C++ Best Practices Guide, section
"Occupancy"): registers are allocated to warps, shared memory to blocks, and the scarcest of
registers, shared memory, warps and blocks decides. A program of Triton is one block.

Bytes in flight follow from Little's law: to move `bandwidth` bytes per second when a load takes
`latency` seconds, bandwidth · latency bytes have to be under way at any time, a multiprocessor's
part of them on each (Volkov, Understanding Latency Hiding on GPUs, Berkeley 2016, chapter 3).
"""

from dataclasses import dataclass

from hardware import DATA_SHEETS
from tools.compile_kernels.targets import Target


@dataclass(frozen=True)
class Occupancy:
    blocks: int  # on one multiprocessor
    warps: int
    limit: str  # what allows no more blocks


def occupancy(target: Target, threads: int, registers: int, shared: int) -> Occupancy:
    """The blocks of `threads` threads, each with `registers` registers, and of `shared` bytes of
    shared memory that fit on a multiprocessor."""
    limits = target.limits
    warps = -(-threads // target.lanes)
    each = -(-registers * target.lanes // limits.register_unit) * limits.register_unit
    # a warp belongs to one of the parts of a multiprocessor, which have their own registers
    by_registers = limits.registers // limits.parts // max(each, 1) * limits.parts // warps
    room = {
        "registers": by_registers,
        "shared memory": limits.shared // max(shared + limits.shared_of_system, 1),
        "threads": limits.warps // warps,
        "blocks": limits.blocks,
    }
    blocks = min(room.values())
    # "threads" comes first if it is the limit too: then the multiprocessor is full
    order = sorted(room, key=lambda name: (room[name], name != "threads"))
    return Occupancy(blocks, blocks * warps, order[0])


def bytes_needed(target: Target) -> int | None:
    """The bytes that a multiprocessor must have in flight to reach the memory's bandwidth; None if
    the latency is not known. Memory answers later under load, so this is the least."""
    if target.latency is None:
        return None
    sheet = DATA_SHEETS[target.device]
    return round(sheet.memory_bytes_per_second * target.latency / sheet.multiprocessors)
