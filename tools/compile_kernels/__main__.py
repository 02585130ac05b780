"""Compiles every Triton kernel for GPUs that need not be present, and checks the machine code.

    python -m tools.compile_kernels                                 for T4, A100, H100, B200, MI300X
    python -m tools.compile_kernels --target sm_90 --only rms_norm  some of them
    python -m tools.compile_kernels --specimens my_kernels.py       your own, in a list SPECIMENS
    python -m tools.compile_kernels --json kernels.json             the table as JSON

The kernels are compiled exactly as they would be launched: the operations are called
(specimens.py), and Triton's own launcher chooses types, alignments and options; only the launch
itself is skipped. A kernel fails (exit status 1) with one of these faults:

    spills   values do not fit into registers and go to memory: a stack, or local memory
    narrow   a thread moves less than 16 bytes at a time although the tensors' alignment allows 16
    shared   the kernel needs more shared memory than a program can have, which Triton would notice
             only at launch
    threads  the kernel needs more threads than a program can have (likewise)

Columns: registers per thread (AMD: vector registers); stack in bytes per thread; local: loads and
stores of spilled values; loads and stores of tensors in global memory, 16 bytes wide or narrower;
shared memory in bytes per program.
"""

import os
from pathlib import Path

from errors import UserError
from tools.command import CommandParser, reports_errors, run_command, write_json
from tools.compile_kernels import TARGETS


def check_triton() -> None:
    """Raise UserError if kernels cannot be compiled here."""
    try:
        import triton
    except ImportError:
        why = "is not installed, but is needed to compile kernels"
        raise UserError("triton", None, why, "pip install triton (Linux only)") from None
    if triton.knobs.runtime.interpret:
        why = "makes Triton interpret kernels instead of compiling them"
        value = os.environ.get("TRITON_INTERPRET")
        raise UserError("TRITON_INTERPRET", value, why, "unset TRITON_INTERPRET")


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.compile_kernels", description=__doc__)
    parser.option("--target", str, None, "GPUs (default: all)", nargs="+", choices=TARGETS)
    parser.option("--only", str, "TEXT", "only specimens whose name contains it", default="")
    own = "use FILE instead of tools/compile_kernels/specimens.py"
    parser.option("--specimens", Path, "FILE", own)
    parser.option("--json", Path, "FILE", "write the table, with each fault in full")
    options = parser.parse_args(arguments)
    check_triton()  # imports Triton before any kernel, so that kernels are compiled ones
    import torch

    from tools.compile_kernels import compiler, specimens

    torch.set_num_threads(1)  # processes are forked: there must be no threads
    given = {
        name: specimens.SPECIMENS if TARGETS[name].has_bfloat16 else specimens.OF_FLOAT16
        for name in options.target or TARGETS
    }
    if options.specimens is not None:
        given = dict.fromkeys(options.target or TARGETS, compiler.specimens_in(options.specimens))
    launches = [
        launch
        for target, each in given.items()
        for launch in compiler.launches_of([s for s in each if options.only in s.name], target)
    ]
    if not launches:
        remedy = "give a part of a name in the list of specimens"
        raise UserError("--only", options.only, "no specimen's name contains it", remedy)
    reports = compiler.compile_all(launches)
    write_json(options.json, reports)
    print(f"compiled by Triton {compiler.triton.__version__}\n\n{compiler.describe(reports)}")
    failed = [report for report in reports if report["faults"]]
    for report in failed:
        where = "\n{kernel} ({specimen}) on {target}".format(**report)
        print(where, *report["faults"], sep="\n    ")
    print(f"\n{len(reports)} kernels compiled, {len(failed)} with faults")
    return int(bool(failed))


if __name__ == "__main__":
    run_command(main)
