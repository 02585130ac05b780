"""Compiles every Triton kernel for GPUs that need not be here; the machine code says what it does.

    python -m tools.compile_kernels                                 all, for A100, H100 and MI300X
    python -m tools.compile_kernels --target sm_90 --only rms_norm  some of them
    python -m tools.compile_kernels --specimens my_kernels.py       your own, in a list SPECIMENS
    python -m tools.compile_kernels --json kernels.json             the table for programs

What is compiled is what is launched: the operations are called (specimens.py), and
Triton's own launcher decides on types, alignments and options; only the launch itself is left out.
A kernel fails (exit status 1) by

    spills   values do not fit the registers and go to memory: a stack, or accesses to local memory
    narrow   a thread moves less than 16 bytes at a time of tensors whose alignment would allow 16
    shared   more shared memory than a program can have (Triton finds out when it launches)
    threads  more of them than a program can have (likewise)

Columns: registers per thread (AMD: vector registers); stack in bytes per thread; local: loads and
stores of spilled values; loads and stores of tensors in global memory, of 16 bytes + of fewer;
shared memory in bytes per program.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from errors import UserError
from tools.compile_kernels.targets import TARGETS


def check_triton() -> None:
    """Raises UserError where kernels cannot be compiled."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        why = "Triton interprets kernels then, instead of compiling them"
        raise UserError("TRITON_INTERPRET", "1", why, "unset TRITON_INTERPRET")
    try:
        import triton  # noqa: F401 - the compiler imports it
    except ImportError:
        why = "it is not installed, and it is what compiles kernels"
        raise UserError("triton", None, why, "pip install triton (Linux only)") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compile_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target", nargs="+", choices=TARGETS, default=[*TARGETS], help="GPUs (default: all)"
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="specimens whose name contains it"
    )
    parser.add_argument(
        "--specimens",
        type=Path,
        metavar="FILE",
        help="instead of tools/compile_kernels/specimens.py",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the table, with each fault in full"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="at once (default: one a core)",
    )
    options = parser.parse_args(arguments)
    try:
        check_triton()  # imports Triton before any kernel is imported, which are then compiled ones
        import torch

        from tools.compile_kernels import compiler, specimens

        given = specimens.SPECIMENS
        if options.specimens is not None:
            given = compiler.specimens_in(options.specimens)
        chosen = [specimen for specimen in given if options.only in specimen.name]
        if not chosen:
            remedy = f"one of {', '.join(s.name for s in given)}"
            raise UserError("--only", options.only, "no specimen is called so", remedy)
        torch.set_num_threads(1)  # processes are forked: there must be no threads
        reports = compiler.compile_all(
            [launch for name in options.target for launch in compiler.launches_of(chosen, name)],
            options.processes,
        )
        if options.json is not None:
            text = json.dumps([asdict(report) for report in reports], indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"compiled by Triton {compiler.triton.__version__}", compiler.table(reports), sep="\n\n")
    failed = [report for report in reports if report.faults]
    for report in failed:
        head = f"\n{report.kernel} ({report.specimen}) on {report.target}"
        print(head, *report.faults, sep="\n    ")
    print(f"\n{len(reports)} kernels compiled, {len(failed)} with faults")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
