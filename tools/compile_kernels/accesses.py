"""The accesses to global memory in compiled code, and the source lines that they come from."""

import linecache
import re
from dataclasses import dataclass
from pathlib import Path

AMD_SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}  # all others are smaller

Place = tuple[str, int, int]  # file, line and column of the source


def row_accesses(ttir: str) -> set[Place]:
    """The places in the source where single numbers, or one number per row, are loaded and stored,
    from Triton's intermediate code."""
    named = dict(re.findall(r"^#loc(\d*) = loc\((.*)\)$", ttir, re.MULTILINE))

    def place(text: str) -> Place:
        if found := re.match(r'"([^"]+)":(\d+):(\d+)', text):
            return Path(found[1]).name, int(found[2]), int(found[3])
        # "name"(#loc1), or callsite(#loc1 at #loc2): the callee comes first
        inner = re.search(r"#loc(\d*)", text)
        assert inner, text
        return place(named[inner[1]])

    found = re.findall(r"tt\.(?:load|store) .* : (.*) loc\((.*)\)$", ttir, re.MULTILINE)
    return {
        place(location)
        for kind, location in found
        if not kind.startswith("tensor") or "x1x!tt.ptr" in kind
    }


@dataclass(frozen=True)
class Access:
    """An instruction that reads or writes global memory."""

    what: str  # load, store
    size: int  # bytes per thread
    places: tuple[Place, ...]  # in the source, followed by the call sites, innermost first


# The line number of an access that the compiler merged from two branches; it is of single numbers.
MERGED = 0


def accesses(assembly: str) -> list[Access]:
    """The accesses in PTX or AMD assembly, both of which contain the source line of each
    instruction."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "(?:.*[/"])?([\w.]+)"$', assembly, re.MULTILINE))
    found: list[Access] = []
    places: tuple[Place, ...] = (("an unknown file", -1, 0),)
    in_block = known = False
    for line in assembly.splitlines():
        if "begin inline asm" in line:
            in_block, known = True, False
        elif "end inline asm" in line:
            in_block = False
        elif re.match(r"\s*\.loc\s", line):
            # in a block of inline PTX only the first mark counts; later ones number its own lines
            if not (in_block and known):
                marks = re.findall(r"([\w.]+):(\d+):(\d+)", line)
                marks += [
                    (files[number], row, column)
                    for number, row, column in re.findall(r"inlined_at (\d+) (\d+) (\d+)", line)
                ]
                places = tuple((file, int(row), int(column)) for file, row, column in marks)
                known = True
        elif ptx := re.search(
            r"\b(ld|st)\.(?:[\w:]+\.)*?global\.(?:[\w:]+\.)*?(?:v(\d)\.)?[bfsu](\d+)\b", line
        ):
            size = int(ptx[2] or 1) * int(ptx[3]) // 8
            found.append(Access("load" if ptx[1] == "ld" else "store", size, places))
        elif amd := re.match(r"\s*(?:global|buffer|flat)_(load|store)_(\w+)", line):
            found.append(Access(amd[1], AMD_SIZES.get(amd[2], 2), places))
    return found


def lines_of(access: Access, kernel: Path) -> str:
    """The source lines of an access, in the kernel's file or another file of its folder."""
    lines = [
        f"{file}:{row} {linecache.getline(str(kernel.with_name(file)), row).strip()}"
        for file, row, _ in access.places
    ]
    return ", called by ".join(lines)
