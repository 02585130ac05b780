"""How much code a reader must read to follow one step of 3D training, from the loop to the updated
weights: `python -m tests.reading_path` prints the lines of each file.

It runs a step on 8 ranks (pp 2 × dp_shard 2 × tp 2) and records every function of this repository
that a rank enters. To be read are these functions, the beginnings of their classes and the
docstrings of their files. The fused kernels are left out, because `rms_norm(x)` can be understood
without its code.
"""

import ast
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType

from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from proofs.ranks import Ranks
from tests import ROOT
from tests.steps import make_step, rows_of

ROOMS = ("model", "parallel", "settings", "training")
LEFT_OUT = "model/kernels"


def entered(case: Case) -> set[tuple[str, int]]:
    """(file, first line) of each function that this rank enters in a step."""
    seen: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = os.path.relpath(frame.f_code.co_filename, ROOT)
        if event == "call" and file.startswith(ROOMS) and not file.startswith(LEFT_OUT):
            seen.add((file, frame.f_code.co_firstlineno))

    train = make_step(case)
    rows = rows_of(train)
    sys.setprofile(note)
    try:
        train(0, *rows)
    finally:
        sys.setprofile(None)
    return seen


def to_read(file: Path, first_lines: set[int]) -> set[int]:
    """The numbers of the lines to read in a file: the functions that begin at `first_lines`, their
    classes up to the first method, and the file's docstring."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    lines = set[int]()
    if ast.get_docstring(tree):
        lines.update(range(tree.body[0].lineno, (tree.body[0].end_lineno or 0) + 1))

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if begin in first_lines:
                lines.update(range(begin, (node.end_lineno or begin) + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            end = node.end_lineno or node.lineno
            methods = [f.lineno for f in node.body if isinstance(f, ast.FunctionDef)]
            first = min(methods, default=end)
            if not lines.isdisjoint(range(first, end + 1)):
                lines.update(range(node.lineno, first))
    return lines


def lines_to_read(ranks: Ranks) -> dict[str, int]:
    """File → the number of its lines to read."""
    case = Case(MeshSizes(pp=2, dp_shard=2, tp=2), dtype="float32")
    by_file: dict[str, set[int]] = defaultdict(set)
    for seen in ranks.run(entered, 8, case):
        for file, line in seen:
            by_file[file].add(line)
    loop = ast.parse((ROOT / "train.py").read_text(encoding="utf-8"))
    functions = {node.lineno for node in loop.body if isinstance(node, ast.FunctionDef)}
    schedules = ROOT / "parallel/pipeline/schedules.py"
    (one,) = (
        node.decorator_list[0].lineno
        for node in ast.parse(schedules.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "one_forward_one_backward"
    )
    by_file |= {"train.py": functions, "parallel/pipeline/schedules.py": {one}}
    return {file: len(to_read(ROOT / file, lines)) for file, lines in by_file.items()}


def main() -> None:
    with Ranks(8) as ranks:
        counts = lines_to_read(ranks)
    for file, lines in sorted(counts.items(), key=lambda pair: -pair[1]):
        print(f"{lines:5} {file}")
    whole = sum(len((ROOT / f).read_text(encoding="utf-8").splitlines()) for f in counts)
    print(f"{sum(counts.values())} lines in {len(counts)} files, which have {whole} in all")


if __name__ == "__main__":
    main()
