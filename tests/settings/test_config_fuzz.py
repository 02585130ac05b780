"""Every configuration is refused with one message or works: tried on many, drawn from the JSON
schema, from values that are known to cause trouble, and from noise. (Variables of the environment:
test_init_distributed.py; streams that take no output: test_run_lines.py.)"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from costs.parameters import num_parameters
from costs.summary import flops_per_token
from errors import UserError
from proofs.ranks import Ranks
from settings import checks
from settings.config import Config
from settings.layouts import valid_layout
from settings.load import KEYS, dump_config, load_config
from settings.yaml_text import dump
from tests import ROOT
from tests.runs import names, said_by, status_of, train_run, write_config
from tests.settings.keys import every_key
from tools.schema import schema

LAPTOP = ROOT / "configs/laptop.yaml"
SCHEMA = schema()
OF_TEXT = st.characters(  # without surrogates, which UTF-8 cannot write
    exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="\uffff\ufffe"
)


def referred(node: dict[str, Any]) -> dict[str, Any]:
    """The part of the schema that a node names as `#/$defs/...`."""
    part = SCHEMA
    for name in node["$ref"].removeprefix("#/").split("/"):
        part = part[name]
    return part


PROPERTIES = {section: referred(SCHEMA["properties"][section])["properties"] for section in KEYS}


def fitting(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a part of the schema allows, mostly small ones and the bounds."""
    if "$ref" in node:
        return fitting(referred(node))
    if "anyOf" in node:
        return st.one_of([fitting(option) for option in node["anyOf"]])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if "const" in node:
        return st.just(node["const"])
    least = node.get("minimum", node.get("exclusiveMinimum"))
    most = node.get("maximum", node.get("exclusiveMaximum"))
    match node.get("type"):
        case "integer":
            small = st.integers(least, min(most, least + 8))
            return small | st.sampled_from([least, most]) | st.integers(least, most)
        case "number":
            within = {"exclude_min": "exclusiveMinimum" in node,
                      "exclude_max": "exclusiveMaximum" in node}  # fmt: skip
            small = st.floats(least, min(most, least + 1), **within)
            return st.floats(least, most, **within) | small
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "string":
            usual = st.sampled_from(["prepared/laptop", "none", "zb_v", "x" * node["maxLength"]])
            return usual | st.text(OF_TEXT, min_size=node.get("minLength", 0), max_size=9)
        case "array":
            if "prefixItems" in node:
                return st.tuples(*map(fitting, node["prefixItems"])).map(list)
            return st.lists(fitting(node["items"]), max_size=9)
        case "object" if "properties" in node:
            keys = {key: fitting(value) for key, value in node["properties"].items()}
            return st.fixed_dictionaries({}, optional=keys)
        case "object":
            (values,) = node["patternProperties"].values()
            keys = {"type": "string", **node["propertyNames"]}
            return st.dictionaries(fitting(keys), fitting(values), max_size=3)
    raise AssertionError(f"the schema has a part that is not known here: {node}")


INTEGERS = [-1, 0, 2**31, 2**63, 2**64, 10**30, 10**400]
FLOATS = [float(text) for text in ["0.5", "-0.0", "5e-324", "1e308", "nan", "inf", "-inf"]]
ODD_TEXTS = ["", "nan", "a\nb", "a\0b", "\x1b[31m", "\u2028", "../" * 500, "~", "%N", "/proc/1",
         "x" * 10000]  # fmt: skip
OTHERS = [None, True, [], {}, [[]], [1] * 9999, [0] * 2, {"a": 0}, {"": 1}, {"a": {"b": []}},
          {1: 2}, [None], ["auto"]]  # fmt: skip
ODD = st.sampled_from([*INTEGERS, *FLOATS, *ODD_TEXTS, *OTHERS])
JUNK = ODD | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = every_key()


def schema_of(section: str, key: str) -> dict[str, Any]:
    kind, _, own = key.rpartition(".")
    return PROPERTIES[section][kind]["properties"][own] if kind else PROPERTIES[section][key]


def as_typed(name: tuple[str, str], value: object) -> str:
    """SECTION.KEY=VALUE as one would type it: without the marks of an end that YAML writes."""
    return f"{'.'.join(name)}={dump(value).rstrip().removesuffix('...').rstrip()}"


def allowed(name: tuple[str, str]) -> st.SearchStrategy[str]:
    """An override with a value that the key allows."""
    return st.builds(as_typed, st.just(name), fitting(schema_of(*name)))


RAW = st.text(st.sampled_from("[]{}:,&*!|>'\"%@`#?-~=<. \n\t\0\r0123456789eExXaAn_\ud800é"))
NAME = st.sampled_from(NAMES)
NOISE = st.builds(lambda name, text: f"{'.'.join(name)}={text}", NAME, RAW)
ALLOWED = NAME.flatmap(allowed)
# half of the draws have a value that the key allows
DRAWS = [ALLOWED, ALLOWED, ALLOWED, st.builds(as_typed, NAME, JUNK), NOISE, RAW]
OVERRIDE = st.sampled_from(DRAWS).flatmap(lambda strategy: strategy)


short = settings(
    deadline=30_000,  # milliseconds for a case, which needs at most 5,000 on an idle machine
    max_examples=60, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip
long = settings(short, max_examples=400, derandomize=False, phases=[Phase.generate])


def is_valid(folder: Path, overrides: list[str], world: int) -> bool:
    """Whether it is valid: else it was refused with one complete message. Of a valid one, what a
    run and the tools derive from it before they compute anything is checked too."""
    try:
        config, world = valid_layout(load_config(str(LAPTOP), overrides), world)
    except UserError as error:
        message, parts = str(error), (error.key, error.why, error.remedy)
        assert message.count("\n  remedy: ") == 1
        assert all(parts)
        assert len(message) < 5000
        assert "\x1b" not in message
        return False
    written = folder / "dumped.yaml"
    written.write_text(dump_config(config), encoding="utf-8")
    assert repr(load_config(str(written), [])) == repr(config), "what is written reads back"
    layers = config.split_layers()
    assert [layer for stage in layers for layer in stage] == list(range(config.model.num_layers))
    schedule = config.schedule(config.parallel.mesh_sizes(world).dp)
    assert len(schedule) == config.parallel.pp
    assert num_parameters(config.model) > 0
    assert flops_per_token(config.model, config.train.seq_len) > 0
    return True


@pytest.mark.parametrize(
    "effort", [short, pytest.param(long, marks=pytest.mark.thorough)], ids=["few", "many"]
)
def test_one_message_or_it_works(effort: settings, tmp_path: Path) -> None:
    count = Counter[bool]()
    some = st.lists(OVERRIDE, min_size=1, max_size=3)

    @effort
    @given(some.map(["parallel.dp_shard=-1"].__add__), st.sampled_from([4, 8, 12, 64]))
    def run(overrides: list[str], world: int) -> None:
        count[is_valid(tmp_path, overrides, world)] += 1

    run()
    assert count[False]
    assert count[True]
    assert names(tmp_path) == ["dumped.yaml"], "nothing else is written"


@pytest.mark.thorough
def test_the_fuzz_would_find_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a planted validation step that divides by unchecked values is found. About one case
    in ten draws one of these keys."""

    def careless(config: Config, sizes: object) -> None:
        optimizer = config.optimizer
        values = (optimizer.grad_clip, optimizer.weight_decay, *vars(config.guard).values())
        _ = [1 / value for value in values if isinstance(value, int | float)]

    monkeypatch.setattr(checks, "CHECKS", [careless, *checks.CHECKS])
    effort = settings(short, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(ZeroDivisionError):
        test_one_message_or_it_works(effort, tmp_path)


# Keys not drawn for a run: those that end the process if tiny (hang_*), those that need a server, a
# GPU, a compiler or much memory, those whose text is run or written to, and sizes, where one small
# model is as good as another.
NOT_RUN = {
    "guard": ["hang_factor", "hang_seconds"],
    "run": ["dir", "wandb", "wandb_project", "memory_history", "tensorboard", "on_event",
            "prometheus"],
    "checkpoint": ["after_commit"],
    "data": ["path", "tokenizer"],
    "train": ["compile", "deterministic", "max_minutes", "steps", "seq_len", "global_batch_size",
              "micro_batch_size"],
    "model": ["kernels", "attention_kernel", "dim", "ffn_dim", "num_layers", "vocab_size",
              "attention_dim", "num_heads"],
    "parallel": ["pp", "tp"],
}  # fmt: skip
RUN_NAMES = [(section, key) for section, key in NAMES if key not in NOT_RUN.get(section, [])]
SOME_NAMES = st.lists(st.sampled_from(RUN_NAMES), min_size=1, max_size=6, unique=True)


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_what_is_valid_runs(ranks: Ranks, data: Path, tmp_path: Path, count: int) -> None:
    """Each run must reach its last step, be refused with a message, or end with the error of a
    diverging run."""
    sizes = {"steps": 3, "seq_len": 16, "global_batch_size": 4, "micro_batch_size": 2}
    ends: Counter[str] = Counter()

    @settings(short, max_examples=count, deadline=None, phases=[Phase.generate])
    @given(SOME_NAMES.flatmap(lambda drawn: st.tuples(*map(allowed, drawn))))
    def run(overrides: tuple[str, ...]) -> None:
        here = Path(tempfile.mkdtemp(dir=tmp_path))
        base = write_config(here, data, train=sizes)
        (message,) = ranks.run(said_by, 1, train_run, [base, *overrides])
        if message.startswith("RunFailed: "):
            ends["diverged"] += 1
            return
        ends["refused" if message else "finished"] += 1
        if message:
            assert "\n  remedy: " in message, (overrides, message)
            assert not (here / "run").exists()
        else:
            status = status_of(here)
            assert (status["state"], status["step"]) == ("finished", 3)

    run()
    assert ends["finished"]
