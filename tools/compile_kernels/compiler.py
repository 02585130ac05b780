"""Compiles the kernels that Triton's launcher would launch, and inspects their machine code. Needs
Triton."""

import json
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
from types import SimpleNamespace
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
from tools.command import table
from tools.compile_kernels import TARGETS
from tools.compile_kernels.accesses import MERGED, accesses, lines_of, row_accesses
from tools.compile_kernels.specimens import Specimen

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
WIDE = 16  # bytes; the most that a thread moves with one instruction


# One specialisation of a kernel on one target: the columns that the command's help explains, and
# the faults in full.
Report = dict[str, Any]


# --- what is launched -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """What Triton's launcher passes to the compiler."""

    specimen: Specimen
    target: str
    source: ASTSource
    options: dict[str, Any]


def launches_of(chosen: Sequence[Specimen], target: str) -> list[Launch]:
    """Every launch of the specimens, of which each must launch something. Launches that compile to
    the same kernel and have the same expectations are listed once."""
    found: dict[tuple[Any, ...], Launch] = {}
    launching: list[Specimen] = []
    gpu = GPUTarget(*TARGETS[target].gpu)
    # takes the place of Triton's driver, so that the launcher prepares kernels for this GPU
    absent = SimpleNamespace(
        get_current_device=lambda: gpu,  # the key of the launcher's cache
        get_current_stream=lambda device: 0,
        get_current_target=lambda: gpu,
    )
    for specimen in chosen:

        def keep(
            *, fn: Any, compile: dict[str, Any], specimen: Specimen = specimen, **_: Any
        ) -> bool:
            launching.append(specimen)
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
            mock.patch.object(driver, "_active", absent),
            mock.patch.object(triton.knobs.runtime, "jit_cache_hook", keep),
            mock.patch.object(backend, "LANES", gpu.warp_size),
            # multi_tensor would otherwise accept only tensors on a GPU
            mock.patch.object(multi_tensor, "INTERPRETED", True),
        ):
            specimen.launch()
        if specimen not in launching:
            why = f"launches no kernel on {target}"
            remedy = 'call the operation with kernels="triton", on tensors that are not empty'
            raise UserError("--specimens", specimen.name, why, remedy)
    return list(found.values())


# --- what was compiled ----------------------------------------------------------------------------


def nvidia_usage(cubin: bytes) -> dict[str, int]:
    """The report's registers, stack and local, from the machine code (SASS)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources, sass = (
            subprocess.run(
                [NVIDIA_TOOLS / tool, *options, file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for tool, *options in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm",))
        )
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", resources)}
    local = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return {"registers": found["REG"], "stack": found["STACK"], "local": local}


def amd_usage(assembly: str) -> dict[str, int]:
    """The same from the metadata at the end of the assembly."""
    metadata = re.findall(r"^\s+\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)
    found = {name: int(value) for name, value in metadata}
    spills = found["vgpr_spill_count"] + found["sgpr_spill_count"]
    stack = found["private_segment_fixed_size"]
    return {"registers": found["vgpr_count"], "stack": stack, "local": spills}


def compile_launch(launch: Launch) -> Report:
    target, specimen, kernel = TARGETS[launch.target], launch.specimen, launch.source.fn.fn
    gpu = GPUTarget(*target.gpu)
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
    narrow = {lines_of(access, file) for access in of_tensors if access.size < WIDE}

    faults = []
    if max(usage["stack"], usage["local"]) > target.spills:
        faults.append("spills: {stack} bytes of stack, {local} accesses to them".format(**usage))
    if specimen.wide:
        faults += [
            f"narrow: {text}"
            for text in sorted(narrow)
            if not any(part in text for part in specimen.narrow)
        ]
    if shared > target.shared:
        faults.append(f"shared: {shared:,} bytes; a program can have {target.shared:,}")
    if threads > backend.MAX_THREADS:
        faults.append(f"threads: {threads:,}; a program can have {backend.MAX_THREADS:,}")
    return {
        "specimen": specimen.name,
        "kernel": f"{kernel.__module__.split('.')[-1]}.{kernel.__name__}",
        "target": launch.target,
        "threads": threads,
        **usage,
        "wide_loads": count[True, "load"],
        "narrow_loads": count[False, "load"],
        "wide_stores": count[True, "store"],
        "narrow_stores": count[False, "store"],
        "shared": shared,
        "faults": faults,
        "triton": triton.__version__,  # registers and widths depend on it
    }


def compile_all(launches: Sequence[Launch]) -> list[Report]:
    """Compile the launches in forked processes, which inherit them in memory, because kernels
    cannot be pickled."""
    global _launches
    _launches = launches
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        return list(pool.map(_compile_one, range(len(launches))))


_launches: Sequence[Launch] = ()


def _compile_one(index: int) -> Report:
    return compile_launch(_launches[index])


# --- the table ------------------------------------------------------------------------------------


def describe(reports: Sequence[Report]) -> str:
    """The table that the command's help explains."""
    names = [name for name in reports[0] if name not in ("faults", "triton")]
    rows = [[str(report[name]) for name in names] for report in reports]
    return table([[name.replace("_", " ") for name in names], *rows], left=(0, 1, 2))


def specimens_in(path: Path) -> list[Specimen]:
    try:
        return list(runpy.run_path(str(path), run_name=path.stem)["SPECIMENS"])
    except (KeyError, OSError) as error:
        remedy = "give a Python file with a list SPECIMENS, as tools/compile_kernels/specimens.py"
        raise UserError("--specimens", str(path), f"has no specimens: {error}", remedy) from None
