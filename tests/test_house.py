"""The repository keeps its own rules: which package may import which, no unused configuration
keys, no dead links, no tests that are never run.

Each package's `__init__.py` states its rules; these tests check them against the source, which is
parsed, not run.
"""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

from torch import nn

from model.config import ModelConfig
from model.transformer import Transformer
from parallel.axes import AXES, MeshSizes
from parallel.layer import TensorParallel
from proofs.parity.cases import Case
from settings.config import SECTIONS
from settings.moved import GONE, MOVED
from tests import ROOT
from tests.modules import MODULES, imports, is_test, module_name
from tests.settings.keys import every_key

DOCUMENTS = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

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
    "training": {"settings", "model", "parallel"},
    "runtime": {"training", "settings", "costs", "model", "parallel", "data"},
    "train": {"runtime", "training", "settings", "model", "parallel", "data"},  # and no tool
    "tools": {"train", "runtime", "training", "settings", "costs", "model", "parallel", "data"},
}


def room_of(module: str) -> str:
    return module.split(".")[0]


def forbidden(module: str, imported: set[str]) -> set[str]:
    """The modules in `imported` that the package of `module` may not import."""
    room = room_of(module)
    if room not in MAY_IMPORT and room not in ROOT_FILES:
        return {name for name in imported if is_test(name)}
    # of other packages, parallel/ needs torch alone
    house = {room_of(name) for name in (imported if room == "parallel" else MODULES)}
    outside = {"torch", *sys.stdlib_module_names}
    allowed = MAY_IMPORT.get(room, set()) | {room} | ROOT_FILES | outside
    return {name for name in imported if room_of(name) in house - allowed}


# --- layers ---------------------------------------------------------------------------------------


def attributes(stage: nn.Module) -> set[str]:
    """The names of what the modules of a stage hold, without methods."""
    found = set[str]()
    for module in stage.modules():
        found |= {*vars(module), *module._parameters, *module._modules}
        for kind in set(type(module).__mro__) - set(nn.Module.__mro__):
            found |= {name for name, value in vars(kind).items() if not callable(value)}
    return {name for name in found - set(vars(nn.Module())) if not name.startswith("__")}


def assigned_outside(tree: ast.AST, names: set[str]) -> set[str]:
    """Which of `names` are assigned to, or deleted from, something else than self."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if node.attr in names and ast.unparse(node.value) not in ("self", "ctx")
    }


def test_no_attribute_of_a_layer_is_assigned_outside_its_class() -> None:
    """Control: a planted assignment is found. (Wrappers replace a method, `forward`, as torch's
    own do.)"""
    config = Case(MeshSizes(), router="sigmoid_bias", qk_norm=True).config().model
    names = attributes(Transformer(config, range(2), True, True, TensorParallel()))
    assert {"weight", "matmul", "gradient", "kept", "bias", "rotary"} <= names
    rooms = [name for name in MODULES if room_of(name) in MAY_IMPORT]
    found = {name: assigned_outside(MODULES[name], names) for name in rooms}
    assert not {name: wrong for name, wrong in found.items() if wrong}
    planted = "self.matmul = 1\nctx.tp = tp\nfor layer in layers:\n    layer.matmul, n = other, 2"
    assert assigned_outside(ast.parse(planted), names) == {"matmul"}


# --- imports --------------------------------------------------------------------------------------


def test_each_module_imports_only_what_its_room_may_know() -> None:
    """Control: an import of settings inside a function of parallel/ is found."""
    found = {name: forbidden(name, imports(tree)) for name, tree in MODULES.items()}
    assert not {name: wrong for name, wrong in found.items() if wrong}
    tree = ast.parse(
        "def late():\n    from settings.config import Config\nimport torch, yaml\nimport errors"
    )
    assert forbidden("parallel.mesh", imports(tree)) == {"settings.config", "yaml"}
    assert forbidden("training.step", imports(tree)) == set()
    of_tests = {"tests.training.test_train", "tests.kernels.flash"}
    assert forbidden("tests.runs", of_tests) == {"tests.training.test_train"}


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
            of_tensors = module.startswith(("parallel.", "training.opt", "costs."))  # Tensor.dim()
            assert not names_in(tree) & (keys - ({"dim"} if of_tensors else set())), module
    assert {"dim", "ffn_dim"} <= names_in(ast.parse("a.dim = f(ffn_dim=1)"))


def upwards(module: str, imported: set[str], order: list[str]) -> set[str]:
    """What a module of runtime/ imports that is not above it."""
    below = set(order[order.index(module.split(".")[1]) + 1 :])
    return {
        name for name in imported if name.startswith("runtime.") and name.split(".")[1] in below
    }


def test_runtime_keeps_its_order() -> None:
    text = ast.get_docstring(MODULES["runtime"]) or ""
    order = re.findall(r"^    (\w+)(?:\.py|/) ", text, re.MULTILINE)
    known = {name: imports(tree) for name, tree in MODULES.items() if name.startswith("runtime.")}
    assert sorted(order) == sorted({name.split(".")[1] for name in known})
    found = {name: upwards(name, imported, order) for name, imported in known.items()}
    assert not {name: up for name, up in found.items() if up}
    monitor = {name for name in known if name.startswith("runtime.monitor")}
    knowing = {name for name in known.keys() - monitor if known[name] & monitor}
    assert knowing == {"runtime.start.checks"}, "nobody else needs the monitor"
    # control: an arrow that points up is found, and one within a folder is none
    events = {"runtime.stop", "runtime.signals", "runtime.log.run_log"}
    assert upwards("runtime.log.events", events, order) == {"runtime.stop"}


def test_rooms_list_their_files() -> None:
    for room in ("model", "model.kernels", "parallel", "training", "data", "benchmarks"):
        text = ast.get_docstring(MODULES[room]) or ""
        files = [file.name for file in ROOT.joinpath(*room.split(".")).glob("[!_]*.py")]
        assert not [name for name in files if name not in text], room


# --- configuration --------------------------------------------------------------------------------

KEYS = {".".join(name) for name in every_key()}


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


def test_every_configuration_key_is_read() -> None:
    rooms = {"train", *MAY_IMPORT["train"]}
    running = [tree for name, tree in MODULES.items() if room_of(name) in rooms]
    # The axis sizes are read by name, in a loop (parallel/config.py).
    read = set(AXES).union(*map(attributes_read, running))
    assert not [name for name in KEYS if name.rpartition(".")[2] not in read]
    # Control: a key that only `__post_init__` reads does not count as read.
    checks = "class C:\n    def __post_init__(self):\n        assert self.unused > 0\n"
    uses = "    def use(self):\n        return self.used"
    assert attributes_read(ast.parse(checks + uses)) == {"used"}


# --- links and commands in documents, files of tests ----------------------------------------------


def test_local_links_lead_somewhere() -> None:
    for name, text in DOCUMENTS.items():
        links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
        local = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
        folder = (ROOT / name).parent
        assert [link for link in local if not (folder / link).exists()] == [], name


def test_commands_and_keys_in_the_text_exist() -> None:
    targets = re.findall(r"^([a-z-]+):(?!=)", MAKEFILE, re.MULTILINE)
    kinds = {name.rpartition(".")[0] for name in KEYS if name.count(".") > 1}
    recipes = "".join(file.read_text() for file in (ROOT / "docs/recipes").glob("*.patch"))
    keys = KEYS | kinds | MOVED.keys() | GONE
    keys |= {*re.findall(r'^\+@section\("(.+)"\)', recipes, re.MULTILINE)}
    ends = ("py", "json", "yaml", "safetensors")
    keys |= {f"{section}.{end}" for section in SECTIONS for end in ends}
    for name, text in DOCUMENTS.items():
        text = re.sub(r"^```(?:python|diff)\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
        assert not {*re.findall(r"\bmake ([a-z][a-z-]*)", code)}.difference(targets), name
        assert not {*re.findall(r"-m ((?:tools|benchmarks)\.\w+)", code)}.difference(MODULES), name
        form = rf"\b(?<!from )(({'|'.join(SECTIONS)})\.[a-z_]+)((?:\.[a-z_]+)?)\b(?!/)"
        named = re.findall(form, code)
        assert not {key + own * (key in kinds) for key, _, own in named}.difference(keys), name


def test_the_tree_of_the_readme_is_the_house() -> None:
    """Its folders exist, and no folder with code is missing, in the root or in runtime/."""
    heading = r"^## How the code is organised\n+```\n(.*?)^```$"
    tree = re.search(heading, DOCUMENTS["README.md"], re.DOTALL | re.MULTILINE)
    assert tree
    shown: dict[str, list[str]] = {}  # each folder, with the folders below it
    for line in tree[1].splitlines():
        if line.startswith(" "):
            shown[list(shown)[-1]] += re.findall(r"(\w+)/  ", line)
        elif name := re.match(r"(\w+)/ ", line):
            shown[name[1]] = []
    assert [name for name in shown if not (ROOT / name).is_dir()] == []
    packages = [{file.parent.name for file in folder.glob("*/__init__.py")}
                for folder in (ROOT, ROOT / "runtime")]  # fmt: skip
    assert packages[0] <= shown.keys()
    assert packages[1] == set(shown["runtime"])


def test_make_help_names_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) - {"help"} == set(re.findall(r"@echo 'make ([a-z-]+) ", MAKEFILE))


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call make in `folder`, without what an outer make has put in the environment."""
    return subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *arguments],
        cwd=folder, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip


def test_make_train_samples_the_run_that_it_trains() -> None:
    for given, folder in {
        (): "runs/llama3_8b",
        ("ARGS=run.dir=runs/a optimizer.lr=1e-3 run.dir=runs/b",): "runs/b",
        ("ARGS='run.dir=runs/a'",): "runs/a",
        ("RUN=runs/b",): "runs/b",
    }.items():
        said = make(ROOT, "-n", "train", "PYTHON=python3", "CONFIG=configs/llama3_8b.yaml", *given)
        train, *after = said.stdout.splitlines()[-4:]
        assert re.findall(r"run\.dir=([\w/]+)", train)[-1] == folder  # the last one counts
        assert set(re.findall(r"runs/\w+", " ".join(after))) == {folder}


def test_a_venv_without_its_python_is_named(tmp_path: Path) -> None:
    """After an upgrade of Python, its links lead nowhere."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python3").symlink_to("/gone/python3")
    done = make(tmp_path, ".venv/bin/python")
    assert done.returncode
    assert "rm -r .venv" in done.stderr


def test_every_file_of_tests_is_collected() -> None:
    """By its name, or because the Makefile names it."""
    for file in (ROOT / "tests").rglob("*.py"):
        body = MODULES[module_name(file)].body
        if any(getattr(node, "name", "").startswith("test_") for node in body):
            assert file.name.startswith("test_") or str(file.relative_to(ROOT)) in MAKEFILE
