"""What the check finds, and the lines of code that it names."""

import sys
from dataclasses import dataclass, field
from types import FrameType

import torch

from tools.rehearse.code_lines import FSDP, code_file

RACE, REUSE, SYNC, THREAD = "race", "reused memory", "host waits", "wrong device"


def line() -> str:
    """The line that is being executed: the innermost of this repository, and FSDP's if it is called
    from there. In a backward that autograd runs without our code: the name of its node."""
    ours, fsdp = "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not ours:
        file = code_file(frame.f_code.co_filename) or ""
        if not file.startswith(FSDP):
            ours = file and f"{file}:{frame.f_lineno}"
        elif not fsdp:
            fsdp = f"{file.removeprefix(FSDP)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    if not ours and node is not None:
        ours = f"autograd's {node.name()}"
    return f"{ours}, in FSDP's {fsdp}" if fsdp and ours else ours or fsdp or "an unknown line"


@dataclass
class Findings:
    """The defects found so far: (kind, text) → how often."""

    found: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        self.found[kind, text] = self.found.get((kind, text), 0) + 1

    def lines(self) -> list[str]:
        return [
            f"{kind}: {text}" + (f" ({count} times)" if count > 1 else "")
            for (kind, text), count in self.found.items()
        ]
