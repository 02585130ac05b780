"""Finds the line of code that causes an operator, and the pass of the step to which it belongs.

The line is the innermost one of this repository or of torch's FSDP, except in files that only pass
a call on. An operator of a node of autograd's graph that is written in C++ has no such line while
backward runs; then it is the line of the forward that made the node, which autograd remembers under
anomaly detection.
"""

import re
import sys
from typing import Any, NamedTuple

import torch

from parallel.pipeline.actions import FORWARD, Action
from parallel.pipeline.runner import PipelineRunner
from tools.rehearse.findings import FSDP, code_file

# Files that only pass a call on: the caller's line says more.
PASS_ON = {"model/matmul.py", "parallel/collectives.py", "FSDP _fsdp_common.py"}
# Python 3.12 runs comprehensions inside their function, 3.11 as functions of their own.
INNER = re.compile(r"\.<locals>\.<(listcomp|dictcomp|setcomp|genexpr|lambda)>")

# The passes of a step, in the order in which they are printed.
PASSES = {
    "positions": "rotary angles of the positions, once for all blocks of a stage",
    "forward": "the forward of a micro-batch",
    "recomputation": "what backward computes again, because forward did not keep it",
    "backward": "the backward of a micro-batch, without recomputation",
    "FSDP": "casts, copies, sums and collectives of data parallelism",
    "gradient norm": "after the last backward",
    "guard": "decides whether the step is good enough for an update",
    "optimizer": "clipping and AdamW",
    "around": "batches to the device, counting targets, messages of the pipeline, sums over ranks",
}
OF_A_BLOCK = ("positions", "forward", "recomputation", "backward", "FSDP")
PASS_OF_FILE = {  # outside of forwards and backwards; the first of them on the stack counts
    "training/gradient.py": "gradient norm",
    "training/guard.py": "guard",
    "training/optimizers/__init__.py": "optimizer",
}


class Where(NamedTuple):
    """A place in the code."""

    file: str  # in this repository, or "FSDP …" for a file of torch's FSDP
    function: str
    line: int

    @property
    def key(self) -> str:
        """The place without the number of the line, which changes with every edit."""
        return f"{self.file} {self.function}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


def place(action: Action | None, operator: str = "") -> tuple[str, Where]:
    """The pass and the place of the operator that runs now, inside `action`."""
    where: Where | None = None
    part, recomputes = "around", False
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code_file(code.co_filename)
        if file is not None:
            if where is None or where.file in PASS_ON:
                where = Where(file, INNER.sub("", code.co_qualname), frame.f_lineno)
            if part == "around":
                part = PASS_OF_FILE.get(file, part)
        # checkpoint calls it when backward asks for a tensor that was not kept
        recomputes |= code.co_name == "unpack_hook" and "/torch/utils/" in code.co_filename
        frame = frame.f_back
    if where is None:
        where = Where("(no code of the repository)", "", 0)
    if where.file.startswith(FSDP) or where.file == "parallel/whole.py":
        return "FSDP", where
    if where.file == "model/positions.py":
        return "positions", where
    if action is not None:
        part = "forward" if action.kind is FORWARD else "backward"
    if recomputes:
        part = "recomputation"
    elif where.function == PipelineRunner._backward.__qualname__:
        where = of_node(operator) or where
    return part, where


def of_node(operator: str) -> Where | None:
    """The place of an operator that autograd runs for a node of its graph."""
    node = torch._C._current_autograd_node()
    for line in reversed(node.metadata.get("traceback_", []) if node is not None else []):
        path, number, function = line.strip().split("\n")[0].split(", ")
        file = code_file(path.removeprefix('File "').removesuffix('"'))
        if file is not None and file not in PASS_ON:
            name = f"backward of {function.removeprefix('in ')}"
            if operator == "add":
                name = f"autograd's sum of two gradients, after the {name}"
            return Where(file, name, int(number.split()[-1]))
    return None
