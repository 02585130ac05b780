"""Every configuration is refused with one message or can run: tried on thousands, drawn from the
JSON schema, from values that are known to cause trouble, and from noise.

`make test` tries a few of them, `make test-slow` many. Each test prints the number of cases and of
refusals, and the seconds.
"""

import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from costs.summary import flops_per_token
from errors import UserError
from model.transformer import num_parameters
from tests.data_samples import prepared
from tests.runs import train_run, write_config
from tools.ranks import RankError, Ranks
from tools.schema import schema
from training.config import Config
from training.load_config import KEYS, dump_config, load_config
from yaml_text import dump

ROOT = Path(__file__).parent.parent
LAPTOP = ROOT / "configs" / "laptop.yaml"
MOST_SECONDS = 20  # of CPU time per case; an idle machine needs 0.1 s
SCHEMA = schema()
PROPERTIES: dict[str, dict[str, Any]] = {
    section: SCHEMA["$defs"][SCHEMA["properties"][section]["$ref"].split("/")[-1]]["properties"]
    for section in KEYS
}
short = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
long = settings(short, max_examples=4000, derandomize=False, phases=[Phase.generate])


# --- cases ----------------------------------------------------------------------------------------


def referred(reference: str) -> dict[str, Any]:
    """The part of the schema that `#/$defs/...` names."""
    node = SCHEMA
    for name in reference.removeprefix("#/").split("/"):
        node = node[name]
    return node


def fitting(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a part of the schema allows, mostly small ones and the bounds."""
    if "$ref" in node:
        return fitting(referred(node["$ref"]))
    if "anyOf" in node:
        return st.one_of([fitting(option) for option in node["anyOf"]])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if "const" in node:
        return st.just(node["const"])
    least, most = (
        node.get("minimum", node.get("exclusiveMinimum")),
        node.get("maximum", node.get("exclusiveMaximum")),
    )
    match node.get("type"):
        case "integer":
            return (
                st.integers(least, min(most, least + 8))
                | st.sampled_from([least, most])
                | st.integers(least, most)
            )
        case "number":
            within = {
                "exclude_min": "exclusiveMinimum" in node,
                "exclude_max": "exclusiveMaximum" in node,
            }
            return st.floats(least, most, **within) | st.floats(
                least, min(most, least + 1), **within
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "string":
            usual = st.sampled_from(
                ["prepared/laptop", "none", "zb_v", "interleaved_1f1b", "2:3",
                 "x" * node["maxLength"]]
            )  # fmt: skip
            characters = st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"])
            return usual | st.text(characters, min_size=node.get("minLength", 0), max_size=9)
        case "array":
            if "prefixItems" in node:
                return st.tuples(*map(fitting, node["prefixItems"])).map(list)
            return st.lists(fitting(node["items"]), max_size=9)
        case "object" if "properties" in node:
            keys = {key: fitting(value) for key, value in node["properties"].items()}
            return st.fixed_dictionaries({}, optional=keys)
        case "object":
            (values,) = node["patternProperties"].values()
            return st.dictionaries(
                fitting({"type": "string", **node["propertyNames"]}), fitting(values), max_size=3
            )
    raise AssertionError(f"the schema has a part that is not known here: {node}")


INTEGERS = [-1, 0, 2**31, 2**63, 2**64, 10**30, 10**400]
FLOATS = [float(text) for text in ["0.5", "-0.0", "5e-324", "1e308", "nan", "inf", "-inf"]]
TEXTS = ["", "nan", "a\nb", "a\0b", "\x1b[31m", "\u2028", "../" * 500, "~", "%N", "/proc/1",
         "x" * 10000]  # fmt: skip
OTHERS = [None, True, [], {}, [[]], [1] * 9999, [0] * 2, {"a": 0}, {"": 1}, {"a": {"b": []}},
          {1: 2}, [None], ["auto"]]  # fmt: skip
ODD = st.sampled_from([*INTEGERS, *FLOATS, *TEXTS, *OTHERS])
JUNK = ODD | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = [(section, key) for section, keys in KEYS.items() for key in keys]


@st.composite
def override(draw: st.DrawFn) -> str:
    """`section.key=value`, usually with a value that the key allows."""
    section, key = draw(st.sampled_from(NAMES))
    value = draw(fitting(PROPERTIES[section][key])) if draw(st.integers(0, 3)) else draw(JUNK)
    return f"{section}.{key}={dump(value).removesuffix(chr(10)).removesuffix('...')}"


ALPHABET = [*"[]{}:,&*!|>'\"%@`#?-~=<. \n\t\0\r0123456789eExXaAn_", "\ud800", "é", "<<: ", "&a ",
            "*a", "!!"]  # fmt: skip
RAW = st.text(st.sampled_from([letter for token in ALPHABET for letter in token]))
SPLICES = b"&a [x]|*a|<<: |!!python/name:os.system|\t|\0|- |? |[[[[[[[[[[|{{{{{{{{{{".split(b"|")
SPLICES += [b"\n---\n", b"train:", b"steps: 1\n", b"\n\n\n"]


@st.composite
def damaged_file(draw: st.DrawFn) -> bytes:
    """configs/laptop.yaml with pieces removed, repeated or inserted."""
    text = LAPTOP.read_bytes()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(len(text), start + 200)))
        copies = st.sampled_from([b"", text[start:stop] * 2, text[start:stop] * 30, *SPLICES])
        piece = draw(copies | st.binary(max_size=9))
        text = text[:start] + piece + text[stop:]
    return text


# --- expected outcomes ----------------------------------------------------------------------------


def outcome(path: Path, overrides: list[str], world: int) -> Config | None:
    """The configuration, or None if it was refused correctly, with one complete message."""
    began = time.process_time()
    error, config = None, None
    try:
        config = load_config(str(path), overrides)
        config.validate(world)
    except UserError as refused:
        error = refused
    assert time.process_time() - began < MOST_SECONDS
    if error is None:
        return config
    message = str(error)
    assert message.count("\n  remedy: ") == 1
    assert all([error.key, error.why, error.remedy])
    assert len(message) < 5000
    assert "\x1b" not in message
    return None


def check_valid(config: Config, path: Path, world: int) -> None:
    """Check what a run and the tools derive from a configuration before they compute anything."""
    written = path.with_name("dumped.yaml")
    written.write_text(dump_config(config), encoding="utf-8")
    assert repr(load_config(str(written), [])) == repr(config)
    layers = config.split_layers()
    assert [layer for stage in layers for layer in stage] == list(range(config.model.num_layers))
    schedule = config.schedule(config.parallel.mesh_sizes(world).dp)
    assert len(schedule) == config.parallel.pp
    assert num_parameters(config.model) > 0
    assert flops_per_token(config.model, config.train.seq_len) > 0


class Row:
    """Counts the cases that a test tried, and prints them at its end."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.began = name, Counter[str](), time.perf_counter()

    def try_one(self, path: Path, overrides: list[str], world: int) -> None:
        config = outcome(path, overrides, world)
        self.count["refused" if config is None else "valid"] += 1
        if config is not None:
            check_valid(config, path, world)

    def show(self) -> None:
        seconds = time.perf_counter() - self.began
        count = self.count
        cases = f"{count.total()} cases, {count['refused']} refused, {count['valid']} valid"
        print(f"fuzz of the configuration, {self.name}: {cases}, no failure, {seconds:.1f} s")
        assert self.count["refused"]
        assert self.count["valid"]


def drawn_overrides(base: Path, effort: settings) -> None:
    row = Row("keys")

    @effort
    @given(st.lists(override(), min_size=1, max_size=3), st.sampled_from([1, 2, 3, 8, 64]))
    def run(overrides: list[str], world: int) -> None:
        overrides = [
            "parallel.dp_shard=-1",
            *(["parallel.tp=1", "parallel.pp=1"] if world < 4 else []),
            *overrides,
        ]
        row.try_one(base, overrides, world)

    run()
    row.show()


def raw_overrides(base: Path, effort: settings) -> None:
    row = Row("noise on the command line")

    @effort
    @given(st.sampled_from(NAMES), RAW, st.booleans())
    def run(name: tuple[str, str], text: str, at_a_key: bool) -> None:
        row.try_one(base, [f"{'.'.join(name)}={text}" if at_a_key else text], 8)

    run()
    row.show()


def damaged_files(base: Path, effort: settings) -> None:
    row = Row("damaged files")

    @effort
    @given(damaged_file())
    def run(content: bytes) -> None:
        path = base.with_name("damaged.yaml")
        path.write_bytes(content)
        row.try_one(path, [], 8)

    run()
    row.show()


@pytest.mark.parametrize("kind", [drawn_overrides, raw_overrides, damaged_files])
def test_one_message_or_a_configuration(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "laptop.yaml").write_bytes(LAPTOP.read_bytes())
    kind(tmp_path / "laptop.yaml", short)
    assert {path.name for path in tmp_path.iterdir()} <= {
        "laptop.yaml",
        "dumped.yaml",
        "damaged.yaml",
    }, "nothing is written"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [drawn_overrides, raw_overrides, damaged_files])
def test_one_message_or_a_configuration_thousands_of_times(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "laptop.yaml").write_bytes(LAPTOP.read_bytes())
    kind(tmp_path / "laptop.yaml", long)


@pytest.mark.thorough
def test_the_fuzz_would_find_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a planted validation step that divides by unchecked values is found. About one case
    in ten draws one of these keys."""
    (tmp_path / "laptop.yaml").write_bytes(LAPTOP.read_bytes())
    validate = Config.validate

    def careless(self: Config, world: int) -> None:
        optimizer = self.optimizer
        values = (optimizer.grad_clip, optimizer.weight_decay, *vars(self.guard).values())
        _ = [1 / value for value in values if not isinstance(value, str)]
        validate(self, world)

    monkeypatch.setattr(Config, "validate", careless)
    effort = settings(short, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(ZeroDivisionError):
        drawn_overrides(tmp_path / "laptop.yaml", effort)


# --- runs -----------------------------------------------------------------------------------------

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


@st.composite
def run_overrides(draw: st.DrawFn) -> list[str]:
    names = draw(st.lists(st.sampled_from(RUN_NAMES), min_size=3, max_size=8, unique=True))
    drawn = [
        (f"{section}.{key}", draw(fitting(PROPERTIES[section][key]))) for section, key in names
    ]
    return [
        f"{name}={dump(value).removesuffix(chr(10)).removesuffix('...')}" for name, value in drawn
    ]


def some_runs(ranks: Ranks, folder: Path, count: int) -> None:
    """Run `count` configurations. Each must reach its last step, be refused with a message, or end
    with the error of a diverging run."""
    data = prepared(folder / "data")
    ends: Counter[str] = Counter()
    began = time.perf_counter()

    @settings(short, max_examples=count, phases=[Phase.generate])
    @given(run_overrides())
    def run(overrides: list[str]) -> None:
        here = Path(tempfile.mkdtemp(dir=folder))
        base = write_config(
            here,
            data,
            train={"steps": 3, "seq_len": 16, "global_batch_size": 4, "micro_batch_size": 2},
        )
        try:
            message = ranks.run(train_run, 1, [base, *overrides])[0]
        except RankError as error:
            assert "RunFailed: " in str(error), overrides  # noqa: PT017
            ends["diverged"] += 1
            return
        ends["refused" if message else "finished"] += 1
        if message:
            assert not (here / "run").exists()
        else:
            status = json.loads((here / "run" / "status.json").read_text())
            assert (status["state"], status["step"]) == ("finished", 3)

    run()
    print(
        f"fuzz of the configuration, runs: {dict(ends)}, no failure, "
        f"{time.perf_counter() - began:.1f} s"
    )
    assert ends["finished"]


def test_what_is_valid_runs(ranks: Ranks, tmp_path: Path) -> None:
    some_runs(ranks, tmp_path, 8)


@pytest.mark.slow
def test_what_is_valid_runs_a_hundred_times(ranks: Ranks, tmp_path: Path) -> None:
    some_runs(ranks, tmp_path, 100)
