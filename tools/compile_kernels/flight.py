"""Counts the bytes of tensors that a thread has in flight at once, in machine code.

A load returns at once, and its register is filled later; the thread goes on until an instruction
needs the value. So the bytes in flight are those of the loads that were issued and not yet waited
for. How many there are is up to the assembler, which moves loads away from their uses, so they are
counted in what it wrote, not in Triton's code or PTX.

In NVIDIA's machine code, a load names one of six barriers, and an instruction has a mask of the
barriers that it waits for. Both are in the upper half of the instruction's 128 bits, in places that
NVIDIA does not document (Jia et al., Dissecting the NVIDIA Volta GPU Architecture via
Microbenchmarking, arXiv:1804.06826, section 2.1). In AMD's, `s_waitcnt vmcnt(n)` waits until only
the last n accesses to memory are under way (AMD Instinct MI300 Instruction Set Architecture,
section 4.4).

The code is followed in its order, and each loop twice, so that loads for the next iteration count.
Loads for which a thread may be inactive count as if it were active. Machine code does not tell a
tensor's loads from those of single numbers, so what counts is every load of a size in which tensors
are loaded.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

AMD_SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}  # all others are smaller


@dataclass
class Instruction:
    text: str
    control: int = 0  # NVIDIA: barriers and waits
    target: int | None = None  # of a jump, as an index


@dataclass
class Code:
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # → the index of the next instruction


def read_nvidia(listing: str) -> Code:
    """Parse the output of `nvdisasm -hex`."""
    code = Code()
    for row in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", row):
            code.labels[label[1]] = len(code.instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", row):
            code.instructions.append(Instruction(found[1]))
        elif upper := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$", row):
            code.instructions[-1].control = int(upper[1], 16) >> 41
    return _jumps(code, r"(?:@!?U?P\d )?BRA(?:\.\w+)* .*?(\.L_x_\d+)")


def read_amd(assembly: str) -> Code:
    code = Code()
    for row in assembly.splitlines():
        if label := re.match(r"(\.LBB\w+):", row):
            code.labels[label[1]] = len(code.instructions)
        elif found := re.match(r"\s+([sv]_|global_|buffer_|flat_|ds_)(\S+)(.*)", row):
            text = f"{found[1]}{found[2]}{found[3]}"
            code.instructions.append(Instruction(text.split(";")[0].strip()))
    return _jumps(code, r"s_c?branch\S* (\.LBB\w+)")


def _jumps(code: Code, pattern: str) -> Code:
    for instruction in code.instructions:
        if found := re.match(pattern, instruction.text):
            instruction.target = code.labels.get(found[1])
    return code


def followed(code: Code) -> Iterator[Instruction]:
    """The instructions in their order, with the body of each loop twice."""
    at, repeated = 0, set()
    while at < len(code.instructions):
        instruction = code.instructions[at]
        yield instruction
        target = instruction.target
        if target is not None and target < at and at not in repeated:
            repeated.add(at)
            at = target
        else:
            at += 1


def in_flight_nvidia(code: Code, sizes: Collection[int]) -> int | None:
    """The most bytes that are in flight at once, of loads with one of these sizes in bytes; None if
    the code copies asynchronously into shared memory, which is not counted."""
    waiting = dict.fromkeys(range(8), 0)  # bytes by barrier; 7 is none
    most = 0
    for one in followed(code):
        if re.search(r"\b(?:LDGSTS|UTMALDG|UBLKCP)", one.text):
            return None
        for barrier in range(6):
            if one.control >> 11 & 1 << barrier:
                waiting[barrier] = 0
        if load := re.search(r"\bLDG(?:\.\w+)*", one.text):
            width = re.search(r"\.[US]?(8|16|64|128)\b", load[0])
            size = int(width[1]) // 8 if width else 4
            waiting[one.control >> 5 & 7] += size if size in sizes else 0
            most = max(most, sum(waiting.values()))
        elif re.match(r"EXIT\b", one.text):  # what follows is another path
            waiting = dict.fromkeys(waiting, 0)
    return most


def in_flight_amd(code: Code, sizes: Collection[int]) -> int:
    """The same on AMD, where a load with `lds` is waited for like any other."""
    waiting: list[int] = []  # the bytes of each access, oldest first; stores have none
    most = 0
    for one in followed(code):
        if wait := re.match(r"s_waitcnt\b.*vmcnt\((\d+)\)", one.text):
            waiting = waiting[max(0, len(waiting) - int(wait[1])) :]
        elif found := re.match(r"(?:global|buffer|flat)_(load|store|atomic)_(\w+)", one.text):
            size = AMD_SIZES.get(found[2], 2)
            waiting.append(size if found[1] == "load" and size in sizes else 0)
            most = max(most, sum(waiting))
        elif re.match(r"s_endpgm\b", one.text):
            waiting = []
    return most


READERS = {"cuda": read_nvidia, "hip": read_amd}
IN_FLIGHT: dict[str, Callable[[Code, Collection[int]], int | None]] = {
    "cuda": in_flight_nvidia,
    "hip": in_flight_amd,
}
