"""What the check of races finds, and the lines of code that cause what a step does."""

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from traceback import walk_stack

import torch

RACE, REUSE, SYNC, THREAD = "race", "reused memory", "host waits", "wrong device"
Findings = Counter[tuple[str, str]]  # (kind, text) → how often

ROOT = Path(__file__).parent.parent.parent
# They watch; they do not cause.
_OBSERVERS = tuple(f"{ROOT}/{name}/" for name in ("benchmarks", "costs", "tools/rehearse"))
_FSDP = "/torch/distributed/fsdp/"
FSDP = "FSDP "  # before the name of a file of FSDP2


@cache
def code_file(path: str) -> str | None:
    """The name of a file of this repository, or of FSDP2 (`FSDP …`); None for all others, and for
    those that only watch."""
    if _FSDP in path:
        return f"{FSDP}{Path(path).name}"
    if not path.startswith(f"{ROOT}/") or "/site-packages/" in path:
        return None
    return None if path.startswith(_OBSERVERS) else path.removeprefix(f"{ROOT}/")


def line() -> str:
    """The line that is being executed: the innermost of this repository, and FSDP's if it is called
    from there. In a backward that autograd runs without our code: the name of its node."""
    ours, fsdp, node = "", "", torch._C._current_autograd_node()
    for frame, number in walk_stack(sys._getframe(1)):
        file = code_file(frame.f_code.co_filename) or ""
        if file.startswith(FSDP):
            fsdp = fsdp or f"{file.removeprefix(FSDP)}:{number} {frame.f_code.co_name}"
        elif file:
            ours = f"{file}:{number}"
            break
    if not ours and node is not None:
        ours = f"autograd's {node.name()}"
    return f"{ours}, in FSDP's {fsdp}" if fsdp and ours else ours or fsdp or "an unknown line"
