"""Validation of the configuration: bounds, unknown keys, what cannot be combined, invalid YAML; and
its JSON schema."""

import dataclasses
import math
import pwd
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from declare import WithKinds, settings_class
from errors import UserError
from model.attention import sliding_window
from model.config import ModelConfig
from model.experts import Experts
from runtime.trainer_state import DataState, state_of
from settings.checks import validate
from settings.load import (
    KEYS,
    KINDS,
    MAX_CHARACTERS,
    SECTIONS,
    dump_config,
    load_config,
    load_saved,
)
from settings.moved import at_new_places
from tests import ROOT
from tests.runs import messages
from tests.settings.keys import every_key
from tools import schema
from tools.plan.layout import world_of
from training.optimizers import adamw

LAPTOP = str(ROOT / "configs/laptop.yaml")
SHARED = ["parallel.dp_shard=-1"]


def refusal(overrides: list[str], path: str = LAPTOP, world: int = 8) -> str:
    with pytest.raises(UserError) as caught:
        validate(load_config(path, overrides), world)
    return str(caught.value)


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


# --- bounds ---------------------------------------------------------------------------------------


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


def test_every_number_has_bounds() -> None:
    assert unbounded(schema.schema(), "") == []
    assert unbounded({"a": [{"type": "number", "minimum": 0}]}, "") == [".a.0"], "the control"


def test_a_section_made_in_python_checks_itself_too() -> None:
    laptop = load_config(LAPTOP, []).model
    with pytest.raises(UserError, match=r"^model\.norm_eps = nan: "):
        dataclasses.replace(laptop, norm_eps=math.nan)
    with pytest.raises(UserError, match=r"^model\.dim = 'wide': is not allowed"):
        dataclasses.replace(laptop, dim="wide")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^model\.num_layers = None: is missing"):
        ModelConfig(dim=2)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"^model\.width = 2: there is no such key"):
        ModelConfig(width=2)  # type: ignore[call-arg]


WRONG = [
    ("train.lr=1", "did you mean optimizer.lr?"),
    ("train.schedule=cosine", "did you mean parallel.schedule or optimizer.schedule?"),
    ("train.global_batch=4", "did you mean train.global_batch_size?"),
    ("data.zzz=1", "choose from data.path, data.tokenizer"),
    ("optimizer.adamw.betas=[0.9, 1]", "1 in it is not allowed\n  remedy: it should be less than"),
    ("optimizer.adamw.betas=[0.9]", "for example [0.9, 0.95]"),
    ("model.sliding_window.window=0", "greater than or equal to 1, for example 4096"),
    ("model.sliding_window.windw=9", "did you mean model.sliding_window.window?"),
    ("model.sliding_window=9", "is not a section with keys\n  remedy: set its keys: model.sliding"),
    ("model.swiglu=9", "this kind has no settings of its own"),
    ("optimizer.lr=.nan", "be a finite number"),
    ("parallel.layers_per_stage=[1, a]", "'a' in it is not allowed"),
    ("parallel.dp_shard=0", "must be positive, or -1"),
    ("model.dim=4000000000", "be less than or equal to 1048576"),
    ("train.steps=", "has no value"),
    ("run.dir=''", "have at least 1 character"),
    ('run.dir="a\\0b"', "be one line without control characters"),
    ('run.dir="\\ud800"', "be text that UTF-8 can write"),
    ("run.dir=~nobody-of-this-name/x", "a user that this machine knows"),
    ("train.steps=5 #6", "is followed by '#6'"),
    ("train.steps=\uff15", "be a valid integer"),
    ("checkpoint.interval=-1", "be greater than or equal to 0, or be 'auto' or 'never'"),
    (f"run.dir={'x' * 5000}", "have at most 4096 characters"),
    (f"data.path={'{' * 1000}", "nested too deeply"),
    (f"data.path={{~/a: 0.7, {Path.home()}/a: 0.1}}", "name each folder once"),
    ("data.path={a: 0.7, ./a: 0.1}", "name each folder once"),
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


# --- kinds ----------------------------------------------------------------------------------------


WINDOW = ["model.attention=[causal,sliding_window]", "model.sliding_window.window=9"]
ONE_AXIS = ["parallel.pp=1", "parallel.tp=1", "parallel.dp_shard=-1", "train.micro_batch_size=1"]
BASE = [*ONE_AXIS, "model.feed_forward=experts", "model.experts.count=8",
        "model.experts.per_token=2"]  # fmt: skip


# (ranks, overrides, how the message begins, its remedy)
TOGETHER = [
    (8, [*BASE, "model.experts.count=0"],
     "model.experts.count = 0: the model has experts", "for example 8"),
    (8, [*BASE, "model.experts.per_token=9"],
     "model.experts.per_token = 9: a token would choose more than all 8 experts",
     "a smaller number"),
    (8, [*BASE, "model.experts.per_token=1"],
     "model.experts.per_token = 1: router softmax_renormalised divides weights by their sum",
     "model.router=softmax"),
    (8, [*BASE, "model.experts.num_dense_layers=4"],
     "model.experts.num_dense_layers = 4: leaves none of the model.num_layers=4 layers for ",
     "leave at least one"),
    (8, [*BASE, "model.sigmoid_bias.bias_rate=0.1"],
     "model.sigmoid_bias = {'bias_rate': 0.1}: nothing is of kind sigmoid_bias",
     "model.router=sigmoid_bias"),
    (8, [*BASE, "train.compile=true"],
     "train.compile = True: how many rows an expert gets is known", "train.compile=false"),
    (8, [*BASE, "parallel.ep=3"],
     "parallel.ep = 3: must divide dp_shard · cp · tp = 8 · 1 · 1",
     "choose one of [1, 2, 4, 8]"),
    (4, [*BASE, "model.experts.count=6", "parallel.ep=4"],
     "parallel.ep = 4: does not divide model.experts.count=6", "choose one of [1, 2, 3, 6]"),
    (2, [*ONE_AXIS, "parallel.ep=2"],
     "parallel.ep = 2: the model has no experts", "parallel.ep=1, or model.experts.count"),
    (4, [*BASE, "parallel.tp=2", "parallel.sequence_parallel=false"],
     "parallel.sequence_parallel = False: tp ranks must have different tokens",
     "set it to true, or parallel.tp=1"),
    # 8 ranks shard 4 experts: each is cut in two, along F or along D
    (8, [*BASE, "model.experts.count=4", "model.experts.ffn_dim=100"],
     "model.experts.ffn_dim = 100: must be a multiple of 8", "give 96, or another parallel.ep"),
    (8, [*BASE, "model.experts.count=4", "model.dim=132", "model.num_heads=2"],
     "model.dim = 132: must be a multiple of 8", "give 128"),
    (2, [*BASE, "parallel.tp=2", "model.experts.num_shared=1", "model.experts.ffn_dim=33"],
     "parallel.tp = 2: does not divide model.experts.num_shared · model.experts.ffn_dim=33",
     "choose one of [1, 3, 11, 33]"),
    # what cuts a sequence into equal parts: context parallelism into 2 cp
    (8, ["train.seq_len=132", "parallel.tp_pieces=4"],
     "train.seq_len = 132: context and sequence parallelism cut it into 8 equal parts "
     "(parallel.tp=2 and parallel.tp_pieces=4)", "use a multiple of 8"),
    (8, ["train.seq_len=140", "parallel.cp=2", "parallel.tp_pieces=2", *SHARED],
     "train.seq_len = 140: context and sequence parallelism cut it into 16 equal parts "
     "(parallel.cp=2 and parallel.tp=2 and parallel.tp_pieces=2)", "use a multiple of 16"),
    (8, ["train.global_batch_size=2000000"],
     "train.global_batch_size = 2000000: it counts sequences (62,500 micro-batches of each "
     "data-parallel rank): are 2,000,000 tokens meant?", "train.seq_len=128 give 15616; else"),
    # products that are too long to build something of that length
    (8, ["train.global_batch_size=100000000", "train.micro_batch_size=50000000"],
     "train.micro_batch_size = ", "often 1 to 16"),
    (8, ["parallel.tp=1000000000"], "parallel.tp = ", ""),
    (8, ["parallel.stages_per_rank=1000000000", "parallel.schedule=interleaved_1f1b"],
     "parallel.stages_per_rank = ", "a smaller number"),
    # other kinds
    (8, ["model.attention=[causal,slidin_window]"],
     "model.attention = ('causal', 'slidin_window'): there is no such kind",
     "'sliding_window'"),
    (8, WINDOW[:1], "model.sliding_window.window = None: is missing", "add it to the file"),
    (1, [*ONE_AXIS, "model.feed_forward=swiglu", "model.experts.count=2"],
     "model.experts = {'count': 2}: nothing is of kind experts",
     "leave it out, or set model.feed_forward=experts"),
    (1, [*ONE_AXIS, "model.router=softmax"],
     "model.router = 'softmax': the model has no experts", ""),
]  # fmt: skip


@pytest.mark.parametrize(("world", "overrides", "begins", "remedy"), TOGETHER)
def test_what_does_not_go_together(world, overrides, begins, remedy) -> None:
    message = refusal(overrides, world=world)
    assert message.startswith(begins)
    assert remedy in message


@pytest.mark.parametrize("whole", ["parallel.sequence_parallel=false", "parallel.tp=1"])
def test_ranks_that_hold_the_whole_sequence_cut_nothing(whole: str) -> None:
    validate(load_config(LAPTOP, ["train.seq_len=131", *SHARED, whole]), 8)


def test_weights_of_a_dense_model_do_not_start_experts(ranks, saved, saved_experts, tmp_path):
    """Nor those of experts a dense model."""
    alone = ["parallel.pp=1", "parallel.tp=1", "parallel.ep=1", f"run.dir={tmp_path}"]
    start = "checkpoint.load_weights_only="
    cases = {"experts": [f"{saved_experts}/config.yaml", *alone, f"{start}{saved}/run"],
             "swiglu": [f"{saved}/config.yaml", *alone, f"{start}{saved_experts}/run"]}  # fmt: skip
    for kind, message in ranks.run(messages, 1, cases)[0].items():
        assert message.startswith(f"model.feed_forward = '{kind}'")
        assert "has model.feed_forward=" in message


def test_a_number_of_experts_is_enough() -> None:
    """The configuration of a run then states the kind of its layers."""
    for keys, kind in (((), "swiglu"), (("model.experts.count=4",), "experts")):
        config = load_config(LAPTOP, ["model.experts.per_token=2"] * len(keys) + list(keys))
        assert config.model.feed_forward == kind
        assert f"feed_forward: {kind}" in dump_config(config)
    assert load_config(LAPTOP, ["model.num_experts=0"]).model.feed_forward == "swiglu"


# --- keys of a kind -------------------------------------------------------------------------------


def test_keys_of_a_kind_arrive(tmp_path: Path) -> None:
    """Also those at the place where scripts have them, of which a later one wins; and what a run
    writes reads back to the same. A section that holds only defaults may stay when its kind is not
    selected, so that an override can select another."""
    overrides = [*WINDOW, "optimizer.adamw.betas=[0,0]", "optimizer.betas=[0.5, 0.6]"]
    config = load_config(LAPTOP, overrides)
    assert config.model.of(sliding_window.Settings).window == 9
    assert config.optimizer.of(adamw.Settings).betas == (0.5, 0.6)
    assert config != load_config(LAPTOP, [*overrides, "model.sliding_window.window=8"])
    assert load_config(written(tmp_path, dump_config(config)), []) == config
    moe = str(ROOT / "configs/laptop_moe.yaml")
    model = load_config(moe, ["model.router_bias_rate=0", "model.router=softmax"]).model
    assert model == load_config(moe, ["model.sigmoid_bias=null", "model.router=softmax"]).model


def test_a_run_of_an_earlier_version_reads(tmp_path: Path) -> None:
    """Its config.yaml and checkpoints have every key at its old place; a dense model too."""
    none = {"num_experts": 0, "experts_per_token": 1, "expert_ffn_dim": None, "router_scale": 1.0,
            "num_shared_experts": 0, "num_dense_layers": 0, "feed_forward": "swiglu",
            "attention_window": None, "attention": "causal", "router_bias_rate": 0}  # fmt: skip
    some = none | {"num_experts": 4, "experts_per_token": 2, "feed_forward": "experts",
                   "attention_window": 9, "attention": "sliding_window"}  # fmt: skip
    own = Experts(count=4, per_token=2), sliding_window.Settings(window=9)
    raw = yaml.safe_load(Path(LAPTOP).read_text(encoding="utf-8"))
    raw["optimizer"] |= {"betas": [0.5, 0.6], "eps": 1e-6}
    raw["guard"] = {"inject_fault": None}
    for keys, settings in (none, (None, None)), (some, own):
        written(tmp_path, yaml.safe_dump(raw | {"model": raw["model"] | keys}))
        config = load_saved(tmp_path)
        assert config == load_config(str(tmp_path / "config.yaml"), [])
        assert config.optimizer.of(adamw.Settings) == adamw.Settings(betas=(0.5, 0.6), eps=1e-6)
        stored = ModelConfig(**at_new_places("model", raw["model"] | keys))
        for model in config.model, stored:
            assert (model.find(Experts), model.find(sliding_window.Settings)) == settings
    for wrong in (0, 5):  # the fault is not the old key's, and is not overlooked
        both = at_new_places("model", raw["model"] | {"num_experts": 4, "experts": wrong})
        with pytest.raises(UserError, match=rf"^model\.experts = {wrong}: is not a section"):
            ModelConfig(**both)


def test_settings_are_named_as_their_files() -> None:
    for section, kinds in KINDS.items():
        for kind, folder in kinds.items():
            if declared := settings_class(folder, kind):
                assert declared.section == f"{section}.{kind}"
    with pytest.raises(TypeError, match="two things named causal: rename"):
        type("Two", (WithKinds,), {"__annotations__": {"causal": int}}, attention="model.attention")
    derived = type("Settings", (sliding_window.Settings,), {})(window=9)  # of another kind
    assert WithKinds.find(SimpleNamespace(other=derived), sliding_window.Settings) is None


def test_what_is_valid_can_be_saved() -> None:
    """The file of a checkpoint's state has bounds, too."""
    window, seed = "model.sliding_window.window=1000000000", f"train.seed={-(2**63)}"
    config = load_config(LAPTOP, ["model.attention=sliding_window", window, seed])
    state = state_of(config, DataState(checksum="x", next_sample=0, skipped=[])).model_dump()
    assert (state["model"]["sliding_window"]["window"], state["seed"]) == (10**9, -(2**63))


# --- the file -------------------------------------------------------------------------------------


FILES = [
    ("", "must be a mapping"),
    ("1: {}", "there is no such section"),
    ("train: 3", "is not a section"),
    ("? [a]\n: {}", "unhashable"),
    ("train: {steps: 1}\ntrain: {steps: 2}", "'train' is given twice"),
    ("train: {steps: 1}\n---\ntrain: {steps: 1}", "expected a single document"),
    ("[" * 1000, "nested too deeply"),
    ("train: \x07", "special characters"),
    ("train: {compile: !!bool maybe}", "holds a value that cannot be read"),
    ("train: !!timestamp x", "holds a value that cannot be read"),
    (b"\xff\xfe\x00", "can't decode byte 0xff"),
    ("# long\n" * (MAX_CHARACTERS // 7 + 1), "is longer than"),
]


@pytest.mark.parametrize(("text", "said"), FILES, ids=lambda value: repr(value)[:30])
def test_files_that_are_no_configuration(tmp_path: Path, text: str | bytes, said: str) -> None:
    message = refusal([], written(tmp_path, text))
    assert said in message
    assert len(message) < 2000


@pytest.mark.parametrize("path", ["", "/nowhere/at.yaml", "/dev/zero", "a\0b", "x" * 5000])
def test_paths_that_are_no_configuration(path: str) -> None:
    assert refusal([], path).startswith("configuration file = ")


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
    "model.attention": {"[causal, causal]": ("causal", "causal")},
    "model.attention_dim": {"null": None, "0128": 128},
    "parallel.layers_per_stage": {"auto": "auto", "[02, 2]": [2, 2]},
    "parallel.zero_stage": {"01": 1},
    "parallel.layouts": {"[{tp: 02}]": [{"tp": 2}]},
    "train.activation_checkpointing": {"none": "none"},
    "optimizer.adamw.betas": {"[.9,0.95]": (0.9, 0.95)},
}  # fmt: skip


@pytest.mark.parametrize("key", ARRIVES)
def test_what_is_typed_arrives(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And config.yaml reads back to the same. A later override replaces an earlier one."""
    monkeypatch.setenv("HOME", "/home/me")
    for typed, value in ARRIVES[key].items():
        config = load_config(LAPTOP, [f"{key}='never'", f"{key}={typed}"])
        arrived = attrgetter(key)(config)
        assert (arrived, type(arrived)) == (value, type(value)), typed
        assert load_config(written(tmp_path, dump_config(config)), []) == config, typed


@pytest.mark.parametrize("change", [("\n", "\r\n"), ("# world", "\ufeff# world")])
def test_a_file_written_on_windows(change: tuple[str, str], tmp_path: Path) -> None:
    text = Path(LAPTOP).read_text(encoding="utf-8").replace(*change)
    config = load_config(written(tmp_path, text), SHARED)
    assert config == load_config(LAPTOP, SHARED)
    assert world_of(written(tmp_path, text), config, None) == 8


# --- the schema -----------------------------------------------------------------------------------


def test_the_schema_is_the_one_in_the_repository() -> None:
    stored = (ROOT / "configs" / "schema.json").read_text(encoding="utf-8")
    assert stored == schema.text(), "update it: python -m tools.schema --out configs/schema.json"


def test_the_schema_knows_every_key_and_its_comment() -> None:
    found = schema.schema()
    described = []
    for section, cls in SECTIONS.items():
        for key, of_key in found["$defs"][cls.__name__]["properties"].items():
            assert "description" in of_key
            keys = {key: of_key}
            if key in KINDS.get(section, {}):
                keys = {f"{key}.{own}": each for own, each in of_key["properties"].items()}
            described += [(section, name) for name, each in keys.items() if "description" in each]
    assert described == every_key()
    steps = found["$defs"]["TrainConfig"]["properties"]["steps"]
    assert (steps["minimum"], steps["description"]) == (0, "optimizer steps of the whole run")
    assert set(found["properties"]) == {*KEYS, "data_stages"}
