"""The repository keeps its own rules: which package may import which, no unused configuration
keys, no dead links, no tests that are never run.

Each package's `__init__.py` states its rules; these tests check them against the source, which is
parsed, not run.
"""

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest

from model.config import ModelConfig
from parallel.axes import AXES
from settings.config import SECTIONS as SECTION_CLASSES
from settings.config import Config
from tests import ROOT
from tests.modules import MODULES, imports, is_test, module_name

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# Modules at the root may be imported everywhere; of this repository they import only each other.
ROOT_FILES = {
    "declare", "errors", "hardware", "kinds", "tokens",
}  # fmt: skip
# Which other packages ("rooms") each one may import, apart from itself and the root files. proofs/,
# tests/ and benchmarks/ may import everything but a test file.
MAY_IMPORT = {
    "model": {"parallel"},
    "parallel": set(),
    "data": set(),
    "costs": {"model", "parallel"},
    "settings": {"costs", "model", "parallel", "data"},
    "training": {"settings", "costs", "model", "parallel", "data"},
    "runtime": {"training", "settings", "costs", "model", "parallel", "data"},
    "train": {"runtime", "training", "settings", "model", "parallel", "data"},  # and no tool
    "tools": {"train", "runtime", "training", "settings", "costs", "model", "parallel", "data"},
}


def forbidden(module: str, imported: set[str]) -> set[str]:
    """The modules in `imported` that the package of `module` may not import."""
    room = module.split(".")[0]
    if room not in MAY_IMPORT and room not in ROOT_FILES:
        return {name for name in imported if is_test(name)}
    house = {name.split(".")[0] for name in MODULES}
    allowed = MAY_IMPORT.get(room, set()) | {room} | ROOT_FILES
    return {name for name in imported if name.split(".")[0] in house - allowed}


# --- imports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_what_its_room_may_know(module: str) -> None:
    assert not forbidden(module, imports(MODULES[module]))


def test_the_import_rule_can_fail() -> None:
    # Control: an import of settings inside a function of parallel/ is found.
    tree = ast.parse(
        "def late():\n    from settings.config import Config\nimport torch\nimport errors"
    )
    assert forbidden("parallel.mesh", imports(tree)) == {"settings.config"}
    assert forbidden("tests.runs", {"tests.training.test_train", "tests.kernels.flash"}) == {
        "tests.training.test_train"
    }


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] == "parallel"])
def test_parallel_needs_torch_alone(module: str) -> None:
    packages = {name.split(".")[0] for name in imports(MODULES[module])}
    assert packages - sys.stdlib_module_names <= {"torch", "parallel"} | ROOT_FILES


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of the graph, or an empty list if it has none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for neighbour in sorted(graph[node] & graph.keys()):
            found = visit(neighbour, [*path, node])
            if found:
                return found
        done.add(node)
        return []

    return next((found for node in graph if (found := visit(node, []))), [])


def names_in(tree: ast.AST) -> set[str]:
    """All names, attributes, arguments, keywords and string constants in `tree`."""
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "value"):
            if isinstance(value := getattr(node, field, None), str):
                found.add(value)
    return found


def test_only_the_model_knows_its_dimensions() -> None:
    """Only model/ uses the dimensions of the model, so that a new kind of layer needs no change in
    the planner or the training step. (In parallel/, `dim` is a dimension of a tensor.)"""
    keys = {"dim", "ffn_dim", "num_kv_heads", "num_heads", "vocab_size", "attention_dim",
            "attention_width", "qk_norm", "head_dim"}  # fmt: skip
    assert keys - {"attention_width", "head_dim"} <= {
        field.name for field in dataclasses.fields(ModelConfig)
    }
    rooms = ("train", "parallel", "settings", "training", "costs", "tools.plan",
             "tools.rehearse", "tools.report")  # fmt: skip
    for module, tree in MODULES.items():
        if f"{module}.".startswith(tuple(f"{room}." for room in rooms)):
            ours = keys - ({"dim"} if module.startswith(("parallel.", "training.opt")) else set())
            methods = {"dim"} if module.startswith("costs.") else set()  # Tensor.dim()
            assert not names_in(tree) & (ours - methods), module
    assert {"dim", "ffn_dim"} <= names_in(ast.parse("a.dim = f(ffn_dim=1)"))


def test_no_module_imports_itself_through_others() -> None:
    assert circle({name: imports(tree) for name, tree in MODULES.items()}) == []
    # control: a planted cycle is found
    assert circle({"a": {"b"}, "b": {"c", "torch"}, "c": {"a"}}) == ["a", "b", "c", "a"]


KNOW_THE_MONITOR = {"runtime.start.checks"}  # nobody else needs it


def order_of_runtime() -> list[str]:
    """The modules and folders of runtime/, as its docstring has them."""
    text = ast.get_docstring(MODULES["runtime"]) or ""
    return re.findall(r"^    (\w+)(?:\.py|/) ", text, re.MULTILINE)


def upwards(module: str, imported: set[str], order: list[str]) -> set[str]:
    """What a module of runtime/ imports that is not above it."""
    below = set(order[order.index(module.split(".")[1]) + 1 :])
    return {
        name for name in imported if name.startswith("runtime.") and name.split(".")[1] in below
    }


def test_runtime_keeps_its_order() -> None:
    order = order_of_runtime()
    modules = {name: tree for name, tree in MODULES.items() if name.startswith("runtime.")}
    assert sorted(order) == sorted({name.split(".")[1] for name in modules})
    found = {name: upwards(name, imports(tree), order) for name, tree in modules.items()}
    assert not {name: up for name, up in found.items() if up}
    assert {
        name
        for name, tree in modules.items()
        if not name.startswith("runtime.monitor")
        if any(each.startswith("runtime.monitor") for each in imports(tree))
    } == KNOW_THE_MONITOR
    # control: an arrow that points up is found, and one within a folder is none
    assert upwards("runtime.log.events", {"runtime.stop", "runtime.signals"}, order) == {
        "runtime.stop"
    }
    assert not upwards("runtime.log.events", {"runtime.log.run_log"}, order)


# --- configuration --------------------------------------------------------------------------------

SECTIONS = {
    field.name: [key.name for key in dataclasses.fields(field.type)]
    for field in dataclasses.fields(Config)
    if field.name in SECTION_CLASSES
}


def attributes_read(tree: ast.AST) -> set[str]:
    """Names read as attributes, except where a configuration validates itself: a key that is only
    validated is not used."""
    found: set[str] = set()
    checks = ("__post_init__", "validate")
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and node.name in checks:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        waiting += ast.iter_child_nodes(node)
    return found


RUNNING = [
    tree for name, tree in MODULES.items() if name.split(".")[0] in {"train", *MAY_IMPORT["train"]}
]
# The axis sizes are read by name, in a loop (parallel/config.py).
READ = set(AXES).union(*(attributes_read(tree) for tree in RUNNING))


@pytest.mark.parametrize(
    "key", [f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys]
)
def test_every_configuration_key_is_read(key: str) -> None:
    assert key.split(".")[1] in READ


def test_an_option_that_nothing_reads_is_found() -> None:
    # Control: a key that only `__post_init__` reads does not count as read.
    checks = "class C:\n    def __post_init__(self):\n        assert self.unused > 0\n"
    uses = "    def use(self):\n        return self.used"
    assert attributes_read(ast.parse(checks + uses)) == {"used"}


# --- links and commands in documents, files of tests ----------------------------------------------


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT))
)
def test_local_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    local = [
        link.split("#")[0]
        for link in links
        if not re.match(r"[a-z]+:", link) and not link.startswith("#")
    ]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT))
)
def test_commands_and_keys_in_the_text_exist(document: Path) -> None:
    text = re.sub(
        r"^```(?:python|diff)\n.*?^```$",
        "",
        document.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    targets = re.findall(
        r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [
        name for name in re.findall(r"\bmake ([a-z][a-z-]*)", code) if name not in targets
    ] == []
    assert [
        name for name in re.findall(r"-m ((?:tools|benchmarks)\.\w+)", code) if name not in MODULES
    ] == []
    keys = re.findall(rf"\b(?<!from )({'|'.join(SECTIONS)})\.([a-z_]+)\b(?!/)", code)
    files = {"py", "json", "yaml", "safetensors"}
    assert [
        f"{section}.{key}"
        for section, key in keys
        if key not in files and key not in SECTIONS[section]
    ] == []


def folders_of_the_readme() -> dict[str, list[str]]:
    """Each folder of the tree in README.md, with the folders below it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(
        r"^## How the code is organised\n+```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    assert tree
    found: dict[str, list[str]] = {}
    for line in tree[1].splitlines():
        if line.startswith(" "):
            found[list(found)[-1]] += re.findall(r"(\w+)/  ", line)
        elif name := re.match(r"(\w+)/ ", line):
            found[name[1]] = []
    return found


def test_the_tree_of_the_readme_is_the_house() -> None:
    """Its folders exist, and no folder with code is missing, in the root or in runtime/."""
    shown = folders_of_the_readme()
    assert [name for name in shown if not (ROOT / name).is_dir()] == []
    assert {file.parent.name for file in ROOT.glob("*/__init__.py")} <= shown.keys()
    assert set(shown["runtime"]) == {
        file.parent.name for file in (ROOT / "runtime").glob("*/__init__.py")
    }


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) - {"help"} == set(re.findall(r"@echo 'make ([a-z-]+) ", makefile))


def test_every_file_of_tests_is_collected() -> None:
    """By its name, or because the Makefile names it."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for file in (ROOT / "tests").rglob("*.py"):
        body = MODULES[module_name(file)].body
        if any(getattr(node, "name", "").startswith("test_") for node in body):
            assert file.name.startswith("test_") or str(file.relative_to(ROOT)) in makefile
