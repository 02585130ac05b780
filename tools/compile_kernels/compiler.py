"""Compiles the kernels that Triton's launcher would launch, and inspects their machine code. Needs
Triton."""

import json
import linecache
import re
import runpy
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

# imported before the kernels, so that they are compiled ones, with or without a GPU
# (model/kernels/backend.py)
import triton

from errors import UserError

# isort: split
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from model.kernels import backend, multi_tensor
from tools.compile_kernels.specimens import Specimen
from tools.compile_kernels.targets import TARGETS

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WIDE = 16  # bytes; the most that a thread moves with one instruction


@dataclass(frozen=True)
class Usage:
    """The resources that a thread uses."""

    registers: int
    stack: int  # bytes
    local: int  # accesses to spilled values
    wide: int | None  # 16-byte accesses to global memory; None: not counted


@dataclass(frozen=True)
class Report:
    """One specialisation of a kernel on one target, with the columns that the command's help
    explains."""

    specimen: str
    kernel: str
    target: str
    threads: int
    registers: int
    stack: int
    local: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int
    shared: int
    faults: list[str]
    triton: str = triton.__version__  # registers and widths depend on it


def gpu_target(name: str) -> GPUTarget:
    """The target in Triton's terms."""
    target = TARGETS[name]
    return GPUTarget(target.backend, target.arch, target.lanes)


# --- what is launched -----------------------------------------------------------------------------


class Absent:
    """Replaces Triton's driver and reports `gpu` as present, so that the launcher prepares kernels
    for it."""

    def __init__(self, gpu: GPUTarget) -> None:
        self.gpu = gpu

    def get_current_device(self) -> GPUTarget:
        return self.gpu  # the key of the launcher's cache

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.gpu


@dataclass(frozen=True)
class Launch:
    """What Triton's launcher passes to the compiler."""

    specimen: Specimen
    target: str
    source: ASTSource
    options: dict[str, Any]


def launches_of(chosen: Sequence[Specimen], target: str) -> list[Launch]:
    """Every launch of the specimens. Launches that compile to the same kernel and have the same
    expectations are listed once."""
    found: dict[tuple[Any, ...], Launch] = {}
    gpu = gpu_target(target)
    for specimen in chosen:

        def keep(
            *, fn: Any, compile: dict[str, Any], specimen: Specimen = specimen, **_: Any
        ) -> bool:
            everything = compile["specialization_data"]
            options = json.loads(everything)["options"]
            options = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in options.items()
            }
            source = ASTSource(
                fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0]
            )
            found.setdefault(
                (everything, specimen.wide, specimen.narrow),
                Launch(specimen, target, source, options),
            )
            return True  # handled: the launcher then neither compiles nor launches

        with (
            mock.patch.object(driver, "_active", Absent(gpu)),
            mock.patch.object(triton.knobs.runtime, "jit_cache_hook", keep),
            mock.patch.object(backend, "LANES", gpu.warp_size),
            # multi_tensor would otherwise accept only tensors on a GPU
            mock.patch.object(multi_tensor, "INTERPRETED", True),
        ):
            specimen.launch()
    return list(found.values())


# --- what was compiled ----------------------------------------------------------------------------

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
AMD_SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}  # all others are smaller


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


def describe(access: Access, kernel: Path) -> str:
    """The source lines of an access, in the kernel's file or another file of its folder."""
    lines = [
        f"{file}:{row} {linecache.getline(str(kernel.with_name(file)), row).strip()}"
        for file, row, _ in access.places
    ]
    return ", called by ".join(lines)


def nvidia_usage(cubin: bytes) -> Usage:
    """Read the usage from the machine code (SASS)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing, sass = (
            subprocess.run(
                [NVIDIA_TOOLS / "cuobjdump", what, file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for what in ("--dump-resource-usage", "-sass")
        )
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", listing)}
    local, wide = (
        len(re.findall(which, sass))
        for which in (r"\b(?:LDL|STL)\b", r"\b(?:LDG|STG|LDGSTS)\S*\.128\b")
    )
    return Usage(found["REG"], found["STACK"], local, wide)


def amd_usage(assembly: str) -> Usage:
    """Read the usage from the metadata at the end of the assembly."""
    found = {
        name: int(value)
        for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)
    }
    spills = found["vgpr_spill_count"] + found["sgpr_spill_count"]
    return Usage(found["vgpr_count"], found["private_segment_fixed_size"], spills, None)


def compile_launch(launch: Launch) -> Report:
    gpu, specimen, kernel = gpu_target(launch.target), launch.specimen, launch.source.fn.fn
    most_shared = TARGETS[launch.target].shared
    compiled = triton.compile(launch.source, target=gpu, options=launch.options)
    nvidia = gpu.backend == "cuda"
    assembly = compiled.asm["ptx" if nvidia else "amdgcn"]
    usage = nvidia_usage(compiled.asm["cubin"]) if nvidia else amd_usage(assembly)
    threads, shared = compiled.metadata.num_warps * gpu.warp_size, compiled.metadata.shared

    of_rows = row_accesses(compiled.asm["ttir"])
    of_tensors = [
        access
        for access in accesses(assembly)
        if access.places[0] not in of_rows and access.places[0][1] != MERGED
    ]
    count = Counter((access.size >= WIDE, access.what) for access in of_tensors)
    file = Path(kernel.__code__.co_filename)
    narrow = {describe(access, file) for access in of_tensors if access.size < WIDE}

    faults = []
    if usage.stack or usage.local:
        faults.append(f"spills: {usage.stack} bytes of stack, {usage.local} accesses to them")
    if specimen.wide:
        faults += [
            f"narrow: {text}"
            for text in sorted(narrow)
            if not any(part in text for part in specimen.narrow)
        ]
    if usage.wide is not None and usage.wide < count[True, "load"] + count[True, "store"]:
        faults.append("narrow: the assembler split 16-byte accesses")
    if shared > most_shared:
        faults.append(f"shared: {shared:,} bytes; a program can have {most_shared:,}")
    if threads > backend.MAX_THREADS:
        faults.append(f"threads: {threads:,}; a program can have {backend.MAX_THREADS:,}")
    return Report(
        specimen=specimen.name, target=launch.target,
        kernel=f"{kernel.__module__.split('.')[-1]}.{kernel.__name__}", threads=threads,
        registers=usage.registers, stack=usage.stack, local=usage.local,
        wide_loads=count[True, "load"], narrow_loads=count[False, "load"],
        wide_stores=count[True, "store"], narrow_stores=count[False, "store"],
        shared=shared, faults=faults,
    )  # fmt: skip


def compile_all(launches: Sequence[Launch], processes: int) -> list[Report]:
    """Compile the launches in forked processes, which inherit them in memory, because kernels
    cannot be pickled."""
    global _launches
    _launches = launches
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        return list(pool.map(_compile_one, range(len(launches))))


_launches: Sequence[Launch] = ()


def _compile_one(index: int) -> Report:
    return compile_launch(_launches[index])


# --- the table ------------------------------------------------------------------------------------


def table(reports: Sequence[Report]) -> str:
    named = "kernel specimen target threads registers stack local loads stores shared"
    head = (*named.split(), "")
    rows = [head] + [
        (
            r.kernel, r.specimen, r.target, str(r.threads), str(r.registers), str(r.stack),
            str(r.local), f"{r.wide_loads} + {r.narrow_loads}",
            f"{r.wide_stores} + {r.narrow_stores}", f"{r.shared:,}",
            ", ".join(dict.fromkeys(fault.split(":")[0] for fault in r.faults)) or "ok",
        )
        for r in reports
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, 1, 2, len(head) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def specimens_in(path: Path) -> list[Specimen]:
    try:
        return list(runpy.run_path(str(path), run_name=path.stem)["SPECIMENS"])
    except (KeyError, OSError) as error:
        remedy = (
            "give a Python file with a list SPECIMENS, such as tools/compile_kernels/specimens.py"
        )
        raise UserError("--specimens", str(path), f"has no specimens: {error}", remedy) from None
