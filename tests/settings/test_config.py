"""Validation of the configuration key by key (bounds, invalid YAML, unknown keys), and its JSON
schema."""

import dataclasses
import math
import os
import pwd
import typing
from pathlib import Path
from typing import Any

import pytest

from errors import UserError
from model.config import ModelConfig
from settings.checks import validate
from settings.data_stages import data_stages
from settings.load import KEYS, MAX_CHARACTERS, SECTIONS, dump_config, load_config
from settings.yaml_text import dump, parse
from tests import ROOT
from tools import schema
from tools.plan.layout import world_of

LAPTOP = str(ROOT / "configs/laptop.yaml")


def refusal(overrides: list[str], path: str = LAPTOP, world: int = 8) -> str:
    with pytest.raises(UserError) as caught:
        validate(load_config(path, overrides), world)
    return str(caught.value)


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


SHARED = ["parallel.dp_shard=-1"]
ALONE = [*SHARED, "parallel.tp=1"]
WHOLE = "parallel.sequence_parallel=false"


@pytest.mark.parametrize(
    ("length", "overrides", "parts"),
    [
        (132, ["parallel.tp_pieces=4"],
         ["parallel.tp=2 × parallel.tp_pieces=4 equal parts",
          "use a multiple of 8, or fewer pieces, or parallel.sequence_parallel=false"]),
        (132, ["parallel.cp=4", *ALONE],
         [" parallelism cut it into 2 · parallel.cp=4 equal parts",
          "use a multiple of 8, or a smaller parallel.cp"]),
        (140, ["parallel.cp=2", *SHARED, "parallel.tp_pieces=2"],
         [": context and sequence parallelism cut it into ",
          "2 · parallel.cp=2 × parallel.tp=2 × parallel.tp_pieces=2 equal parts",
          "use a multiple of 16, or a smaller parallel.cp, or fewer pieces, or "]),
    ],
    ids=["tp", "cp", "cp and tp"],
)  # fmt: skip
def test_a_sequence_that_cannot_be_cut(length: int, overrides: list[str], parts: list[str]) -> None:
    """With sequence parallelism, tp × pieces parts must be equal, with context parallelism 2 cp
    chunks, and each rank's part must be cut over tp. The key, parts and remedies are named."""
    message = refusal([f"train.seq_len={length}", *overrides])
    assert message.startswith(f"train.seq_len = {length}: ")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("length", "overrides"),
    [
        (136, ["parallel.tp_pieces=4"]),
        (132, ["parallel.tp_pieces=4", WHOLE]),
        (133, ["parallel.tp_pieces=4", "parallel.tp=1", "parallel.dp_shard=4"]),
        (136, ["parallel.cp=4", *ALONE]),
        (144, ["parallel.cp=2", *SHARED, "parallel.tp_pieces=2"]),
        (140, ["parallel.cp=2", *SHARED, WHOLE]),
    ],
)
def test_a_sequence_that_can_be_cut(length: int, overrides: list[str]) -> None:
    """One rank, and ranks that hold the whole sequence, cut nothing."""
    validate(load_config(LAPTOP, [f"train.seq_len={length}", *overrides]), 8)


def test_whole_replicas_over_cp() -> None:
    """With zero_stage 0 cp ranks hold replicas; dp_shard ranks must not exist."""
    overrides = ["parallel.zero_stage=0", "parallel.pp=1", "parallel.tp=1"]
    replicas = ["parallel.dp_shard=1", "parallel.dp_replicate=2"]
    config = load_config(LAPTOP, [*overrides, "parallel.cp=4", *replicas])
    validate(config, 8)
    sizes = config.parallel.mesh_sizes(8)
    assert sizes.of_weights() == {"pp": 1, "dp_replicate": 8, "dp_shard": 1, "tp": 1}
    message = refusal([*overrides, "parallel.cp=4", "parallel.dp_shard=2"])
    assert message.startswith("parallel.zero_stage = 0")


# --- bounds ---------------------------------------------------------------------------------------

HINTS = {
    f"{name}.{key}": hint
    for name, cls in SECTIONS.items()
    for key, hint in typing.get_type_hints(cls).items()
}
NUMBERS = [key for key, hint in HINTS.items() if hint in (int, float, int | None)]


NO_BOUNDS = [".nan", ".inf", "-.inf", "1e400", "0x" + "f" * 5000, "-" + "9" * 4000, "true", "[]"]


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_bounds(key: str) -> None:
    for value in NO_BOUNDS:
        message = refusal([f"{key}={value}"])
        assert message.startswith(f"{key} = ")
        assert len(message) < 2000


def unbounded(node: Any, path: str) -> list[str]:
    """The paths of numbers in a schema, at any depth, that lack a minimum or a maximum."""
    node = dict(enumerate(node)) if isinstance(node, list) else node
    if not isinstance(node, dict):
        return []
    found = []
    if node.get("type") in ("integer", "number") and "enum" not in node:
        for bounds in ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}):
            found += [path] * (not bounds & node.keys())
    for key, value in node.items():
        found += unbounded(value, f"{path}.{key}")
    return found


def test_a_number_without_bounds_would_be_found() -> None:
    assert unbounded(schema.schema(), "") == []
    assert unbounded({"a": [{"type": "number", "minimum": 0}]}, "") == [".a.0"], "the control"


def test_a_section_made_in_python_checks_itself_too() -> None:
    laptop = load_config(LAPTOP, []).model
    wrong = {"norm_eps": math.nan, "init_std": -1.0, "z_loss": math.inf, "rope_theta": 0.0}
    for key, value in wrong.items():
        with pytest.raises(UserError, match=rf"^model\.{key} = "):
            dataclasses.replace(laptop, **{key: value})
    with pytest.raises(UserError, match=r"^model\.dim = 'wide': is not allowed"):
        dataclasses.replace(laptop, dim="wide")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^model\.num_layers = None: is missing"):
        ModelConfig(dim=2)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"^model\.width = 2: there is no such key"):
        ModelConfig(width=2)  # type: ignore[call-arg]


WRONG = [
    ("optimizer.learning_rate=1", "did you mean optimizer.lr?"),
    ("train.lr=1", "did you mean optimizer.lr?"),
    ("train.cp_size=2", "did you mean parallel.cp?"),
    ("train.batch_size=1", "did you mean train.global_batch_size?"),
    ("data.zzz=1", "choose from data.path, data.tokenizer"),
    ("optimizer.betas=[0.9, 1]", "1 in it is not allowed\n  remedy: it should be less than 1,"),
    ("optimizer.betas=[0.9]", "for example [0.9, 0.95]"),
    (
        "data.path={prepared/laptop: 0}",
        "0 in it is not allowed\n  remedy: it should be greater than 0",
    ),
    ("data.path={1: 1}", "1 in it is not allowed\n  remedy: it should be a valid string"),
    ("data.path=''", "have at least 1 character, or be a valid dictionary"),
    ("parallel.zero_stage=true", "be a valid integer"),
    ("parallel.zero_stage=1.0", "be a valid integer"),
    (
        "parallel.layers_per_stage=[1, a]",
        "'a' in it is not allowed\n  remedy: it should be a valid integer",
    ),
    ("parallel.layers_per_stage=[-1, 5]", "-1 in it is not allowed"),
    ("parallel.layers_per_stage=best", "be a valid list, or be 'auto'"),
    ("parallel.dp_shard=0", "must be positive, or -1"),
    ("model.dim=4e9", "be a valid integer"),
    ("model.dim=4000000000", "be less than or equal to 1048576"),
    ("train.steps=100000000", "be less than or equal to 99999999"),
    ("train.steps='3'", "be a valid integer"),
    ("train.steps=", "has no value"),
    ("run.dir=''", "have at least 1 character"),
    ('run.dir="a\\nb"', "be one line"),
    ('run.dir="a\\0b"', "be one line without control characters"),
    ('run.dir="\\ud800"', "be text that UTF-8 can write"),
    ("run.dir=\udcff", "be text that UTF-8 can write"),
    ("run.dir=~nobody-of-this-name/x", "a user that this machine knows"),
    ("run.dir=", "have at least 1 character"),
    ("train.steps=5 #6", "is followed by '#6'"),
    ("train.steps=1e3", "be a valid integer"),
    ("train.steps=\uff15", "be a valid integer"),
    ("train.st\u0435ps=5", "did you mean train.steps?"),
    ("data_stages.1.train.steps=5", "the file has 0 data stages"),
    ("checkpoint.interval=often", "be a valid integer, or be 'auto' or 'never'"),
    ("checkpoint.interval=true", "be a valid integer, or be 'auto' or 'never'"),
    ("checkpoint.interval=-1", "be greater than or equal to 0, or be 'auto' or 'never'"),
    (f"run.dir={'x' * 5000}", "have at most 4096 characters"),
    (f"data.path={'{' * 1000}", "nested too deeply"),
    (f"train.steps={'9' * 5000}", "cannot be read"),
    ("train.steps=!!python/object/apply:os.getcwd []", "is not a YAML value"),
]


@pytest.mark.parametrize(("override", "said"), WRONG, ids=[override[:40] for override, _ in WRONG])
def test_wrong_value(override: str, said: str) -> None:
    message = refusal([override])
    key, _, _ = override.partition("=")
    assert message.startswith(f"{key} = ")
    assert said in message
    assert len(message) < 2000


LONG = [  # (overrides, the key that is refused)
    (["train.global_batch_size=2000000"], "train.global_batch_size"),
    (["train.global_batch_size=2000000001"], "train.global_batch_size"),
    (["train.global_batch_size=100000000", "train.micro_batch_size=50000000"],
     "train.micro_batch_size"),
    (["train.global_batch_size=2000000", "train.micro_batch_size=100000", "train.seq_len=512"],
     "train.global_batch_size"),
    (["parallel.tp=1000000000"], "parallel.tp"),
    (["parallel.pp=1000000000"], "parallel.tp"),  # the layout does not fit the world size
    (["parallel.stages_per_rank=1000000000", "parallel.schedule=interleaved_1f1b"],
     "parallel.stages_per_rank"),
    (["parallel.stages_per_rank=2000", "parallel.layers_per_stage=" + str([1] * 4000)],
     "parallel.stages_per_rank"),
    (["model.num_heads=65536"], "model.num_heads"),
    (["model.num_kv_heads=65536"], "model.num_kv_heads"),
    (["model.num_layers=4096", "parallel.stages_per_rank=2000", "parallel.layers_per_stage=auto"],
     "parallel.stages_per_rank"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key"), LONG, ids=[each[0][0][:40] for each in LONG])
def test_nothing_of_a_senseless_length_is_built(
    overrides: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("settings", "parallel"):
        monkeypatch.setattr(
            f"{module}.config.build_schedule", lambda *_: pytest.fail("a schedule was built")
        )
    message = refusal(overrides)
    assert message.startswith(f"{key} = ")
    assert len(message) < 2000


def test_tokens_taken_for_sequences() -> None:
    message = refusal(["train.global_batch_size=2000000"])
    assert "62,500 micro-batches" in message
    assert "are 2,000,000 tokens meant?" in message
    assert "train.seq_len=128 give 15616" in message
    validate(load_config(LAPTOP, ["train.global_batch_size=15616"]), 8)


# --- the file -------------------------------------------------------------------------------------


FILES = [
    ("", "must be a mapping"),
    ("- 1", "must be a mapping"),
    ("1: {}", "there is no such section"),
    ("train: 3", "is not a section"),
    ("train:", "is not a section"),
    ("? [a]\n: {}", "unhashable"),
    ("train: {steps: 1}\ntrain: {steps: 2}", "'train' is given twice"),
    ("train: {steps: 1, 'steps': 2}", "'steps' is given twice"),
    ("train: {1: 2}", "there is no such key"),
    ("a: {<<: {b: 1}}", "there is no such section"),
    ("train: {steps: 1}\n---\ntrain: {steps: 1}", "expected a single document"),
    ("[" * 1000, "nested too deeply"),
    ("train: \x07", "special characters"),
    (b"\xff\xfe\x00", "can't decode byte 0xff"),
    ("# long\n" * (MAX_CHARACTERS // 7 + 1), "is longer than"),
]


@pytest.mark.parametrize(("text", "said"), FILES, ids=lambda value: repr(value)[:30])
def test_files_that_are_no_configuration(tmp_path: Path, text: str | bytes, said: str) -> None:
    message = refusal([], written(tmp_path, text))
    assert said in message
    assert len(message) < 2000


@pytest.mark.parametrize(
    "path", ["", "/", "/nowhere/at.yaml", "/dev/zero", "a\0b", "x" * 5000, "/etc/hosts/x"]
)
def test_paths_that_are_no_configuration(path: str) -> None:
    assert refusal([], path).startswith("configuration file = ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    os.chmod(path, 0)
    assert "Permission denied" in refusal([], path)


# What is typed for a key → what arrives. Numbers are decimal, and text is kept as typed.
KEPT = ["runs/exp #2", "#1", "a: b", "a:b", "10:13", "2026-01-31", " a ", "{a", "[a]", "*a", "&a b",
        "!a", "%a", "@a", "`a", "- a", "| a", "'a' 'b'", '"a" b', '"a" #b"', "it's", "010", "5",
        "1e5", "1e-5", "08", "0x10", "0o7", "1_0", ".5", "1.", "+1", "nan", ".nan", "yes", "null",
        "None", "=", "<<", "é", "---", "$HOME/a", "./~a", "a/~", "{a: 1}"]  # fmt: skip
ARRIVES: dict[str, dict[str, Any]] = {
    "train.steps": {"010": 10, "08": 8, "0": 0, "+5": 5, " 5 ": 5, "1_000": 1000, "0x10": 16,
                    "0o10": 8, "0b11": 3, "&n 7": 7},
    "optimizer.lr": {"3e-4": 3e-4, "010": 10.0, ".5": 0.5, "5.": 5.0, "1": 1.0,
                     "0.1234567890123456789": 0.12345678901234568},
    "train.compile": {"yes": True, "on": True, "True": True, "no": False, "off": False},
    "run.dir": {text: text for text in KEPT} | {
        "'a #b'": "a #b", "'1e5'": "1e5", r'"a\\b"': r"a\b", "~": "/home/me", "~/x": "/home/me/x",
        "'~/x'": "/home/me/x", "~root/x": f"{pwd.getpwnam('root').pw_dir}/x"},
    "run.on_event": {text: text for text in ("", "~/alarm.sh 'a b' #1", '{"a": 1}')},
    "run.wandb_project": {"~x": "~x"},
    "data.tokenizer": {"~/t.model": "/home/me/t.model", "": ""},
    "checkpoint.load_weights_only": {"~/c": "/home/me/c"},
    "checkpoint.resume": {"~/c": "/home/me/c", "auto": "auto"},
    "data.path": {"a: 1": "a: 1", "[a]": "[a]",
                  "{'1e5': 01, ~/b: .3}": {"1e5": 1.0, "/home/me/b": 0.3}},
    "run.prometheus": {"09400": 9400, "a:9400": "a:9400", "~/a #1.prom": "/home/me/a #1.prom"},
    "checkpoint.interval": {"010": 10, "auto": "auto"},
    "model.attention": {"[causal, sliding_window]": ("causal", "sliding_window")},
    "model.attention_dim": {"null": None, "0128": 128},
    "parallel.layers_per_stage": {"auto": "auto", "[02, 2]": [2, 2]},
    "parallel.zero_stage": {"01": 1},
    "parallel.layouts": {"[{tp: 02}]": [{"tp": 2}]},
    "train.activation_checkpointing": {"none": "none"},
    "optimizer.betas": {"[.9,0.95]": (0.9, 0.95)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [(key, *row) for key, rows in ARRIVES.items() for row in rows.items()],
)
def test_what_is_typed_arrives(
    key: str, typed: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives in the section and, where a stage may change the key, in a stage; config.yaml
    reads back to the same. A later override replaces an earlier one."""
    monkeypatch.setenv("HOME", "/home/me")
    section, _, name = key.partition(".")
    config = load_config(LAPTOP, [f"{key}='never'", f"{key}={typed}"])
    arrived = getattr(getattr(config, section), name)
    assert (arrived, type(arrived)) == (value, type(value))
    assert load_config(written(tmp_path, dump_config(config)), []) == config


def test_what_is_typed_for_a_stage_arrives(tmp_path: Path) -> None:
    text = Path(LAPTOP).read_text(encoding="utf-8") + "data_stages: [{from_step: 010}]\n"
    path = written(tmp_path, text)
    overrides = ["data_stages.1.data.path=a #b", "data_stages.1.train.eval_interval=020"]
    stage = data_stages(load_config(path, overrides))[1]
    assert stage.steps.start == 10
    assert (stage.config.data.path, stage.config.train.eval_interval) == ("a #b", 20)
    many = f"data_stages.{'9' * 5000}.train={{}}"
    for override in ("data_stages.1.from_step.x=5", "data_stages.1=5", many):
        assert refusal([override], path).lstrip("'").startswith("data_stages.")


@pytest.mark.parametrize("change", [("\n", "\r\n"), ("# world", "\ufeff# world")])
def test_a_file_written_on_windows(change: tuple[str, str], tmp_path: Path) -> None:
    text = Path(LAPTOP).read_text(encoding="utf-8").replace(*change)
    overrides = ["parallel.dp_shard=-1"]
    config = load_config(written(tmp_path, text), overrides)
    assert config == load_config(LAPTOP, overrides)
    assert world_of(written(tmp_path, text), config, None) == 8


@pytest.mark.parametrize("number", [1e-5, 1 / 3, 1e300, 5e-324, 100, 1e22, -0.1, 3e-3])
def test_numbers_are_read_back_exactly(number: float) -> None:
    read = parse(dump({"a": number}))["a"]
    assert (read, type(read)) == (number, type(number))


# --- the schema -----------------------------------------------------------------------------------


def test_the_schema_is_the_one_in_the_repository() -> None:
    stored = (ROOT / "configs" / "schema.json").read_text(encoding="utf-8")
    assert stored == schema.text(), "update it: python -m tools.schema --out configs/schema.json"


def test_the_schema_knows_every_key_and_its_comment() -> None:
    found = schema.schema()
    for section, cls in SECTIONS.items():
        assert list(found["$defs"][cls.__name__]["properties"]) == KEYS[section]
    steps = found["$defs"]["TrainConfig"]["properties"]["steps"]
    assert (steps["minimum"], steps["description"]) == (0, "optimizer steps of the whole run")
    assert set(found["properties"]) == {*KEYS, "data_stages"}


def test_configuration_files_name_the_schema() -> None:
    named = "# yaml-language-server: $schema=schema.json\n"
    for path in (ROOT / "configs").glob("*.yaml"):
        assert named in path.read_text(encoding="utf-8"), path.name
