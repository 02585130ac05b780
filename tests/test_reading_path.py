"""Measure how much code a reader must read to follow one step of 3D training, from the loop to the
updated weights.

The test runs a step on 8 ranks (pp 2 × dp_shard 2 × tp 2) and records every function of this
repository that a rank enters. To be read are these functions, the beginnings of their classes and
the docstrings of their files. The fused kernels are left out, because `rms_norm(x)` can be
understood without its code.
"""

import ast
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType

from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from tools.parity.cases import Case
from tools.parity.run import global_batch
from training.build import build_stages
from training.step import TrainStep

ROOT = Path(__file__).parent.parent
ROOMS = ("model", "parallel", "training")
LEFT_OUT = "model/kernels"
MAX_FILES, MAX_LINES = 32, 1680
ROW = re.compile(r"^\| (\d+) \| \[(\S+\.py)\]", re.MULTILINE)  # of docs/one_step.md


def entered(case: Case) -> set[tuple[str, int]]:
    """(file, first line) of each function that this rank enters in a step."""
    seen: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = os.path.relpath(frame.f_code.co_filename, ROOT)
        if event == "call" and file.startswith(ROOMS) and not file.startswith(LEFT_OUT):
            seen.add((file, frame.f_code.co_firstlineno))

    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(case.world), "cpu")
    train = TrainStep(config, mesh, build_stages(config, mesh))
    rows = [t.chunk(mesh.dp_size)[mesh.dp_rank] for t in global_batch(case.vocab_size, 0)]
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
    lines = set(docstring_lines(tree))

    def visit(node: ast.AST) -> bool:
        found = False
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                begin = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                if begin in first_lines or visit(child):
                    lines.update(range(begin, (child.end_lineno or begin) + 1))
                    found = True
            elif isinstance(child, ast.ClassDef):
                if visit(child):
                    functions = [f.lineno for f in child.body if isinstance(f, ast.FunctionDef)]
                    lines.update(range(child.lineno, min(functions)))
                    found = True
            else:
                found |= visit(child)
        return found

    visit(tree)
    return lines


def docstring_lines(tree: ast.Module) -> range:
    first = tree.body[0]
    has_one = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return range(first.lineno, (first.end_lineno or 0) + 1) if has_one else range(0)


def test_a_step_is_read_in_an_evening(ranks):
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
    counts = {file: len(to_read(ROOT / file, lines)) for file, lines in by_file.items()}
    whole = sum(len((ROOT / f).read_text(encoding="utf-8").splitlines()) for f in counts)
    for file, lines in sorted(counts.items(), key=lambda pair: -pair[1]):
        print(f"{lines:5} {file}")
    total = sum(counts.values())
    print(f"{total} lines in {len(counts)} files, which have {whole} in all")
    assert "parallel/tensor.py" in counts
    assert "parallel/pipeline/runner.py" in counts
    assert len(counts) <= MAX_FILES
    assert total <= MAX_LINES
    page = (ROOT / "docs" / "one_step.md").read_text(encoding="utf-8")
    assert {file: int(lines) for lines, file in re.findall(ROW, page)} == counts
    assert f"| **{total}** | in {len(counts)} files |" in page


def test_only_what_is_entered_is_counted(tmp_path: Path) -> None:
    source = (
        '"""File."""\n\nclass A:\n    """A."""\n\n    x = 1\n\n    def f(self):\n        return 1\n'
    )
    source += "\n    def g(self):\n        return 2\n\n\ndef h():\n    return 3\n"
    (tmp_path / "file.py").write_text(source)
    assert to_read(tmp_path / "file.py", {8}) == {1, 3, 4, 5, 6, 7, 8, 9}
    assert to_read(tmp_path / "file.py", {15}) == {1, 15, 16}
