"""The modules of the repository, parsed, and what each imports."""

import ast
from pathlib import Path

from tests import ROOT

ROOMS = ("benchmarks", "costs", "data", "docs", "model", "parallel", "proofs", "runtime",
         "settings", "tests", "tools", "training")  # fmt: skip
SOURCES = sorted(
    [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]
)


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): ast.parse(file.read_text(encoding="utf-8")) for file in SOURCES}


def imports(tree: ast.AST) -> set[str]:
    """Every module that `tree` imports, at any level of nesting. `from a import b` imports a, and
    also a.b if that is a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports in this repository are absolute"
            assert node.module
            found |= {node.module} | {
                f"{node.module}.{a.name}"
                for a in node.names
                if f"{node.module}.{a.name}" in MODULES
            }
    return found


def is_test(module: str) -> bool:
    return module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")
