"""Configurations and command lines to try (test_config_fuzz.py): drawn from the JSON schema,
from values that are known to cause trouble, and from noise."""

import json
import re
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from parallel.pipeline.schedules import SCHEDULES
from settings.load import KEYS
from settings.yaml_text import dump
from tests import ROOT
from tools.schema import schema

LAPTOP = ROOT / "configs/laptop.yaml"
SCHEMA = schema()
OF_TEXT = st.characters(  # without surrogates, which UTF-8 cannot write
    exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="\uffff\ufffe"
)


USUAL_TEXTS = ["prepared/laptop", "none", "zb_v", "interleaved_1f1b", "2:3"]


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
            usual = st.sampled_from([*USUAL_TEXTS, "x" * node["maxLength"]])
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
SHORT_KEYS = st.text(max_size=5) | st.integers()
ODD = st.sampled_from([*INTEGERS, *FLOATS, *ODD_TEXTS, *OTHERS])
JUNK = ODD | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT_KEYS, inner, max_size=3),
    max_leaves=6,
)
NAMES = [(section, key) for section, keys in KEYS.items() for key in keys]


def as_typed(name: str, value: object) -> str:
    """NAME=VALUE as one would type it: without the marks of an end that YAML writes."""
    return f"{name}={dump(value).rstrip().removesuffix('...').rstrip()}"


@st.composite
def override(draw: st.DrawFn) -> str:
    """`section.key=value`, usually with a value that the key allows."""
    section, key = draw(st.sampled_from(NAMES))
    value = draw(fitting(PROPERTIES[section][key])) if draw(st.integers(0, 3)) else draw(JUNK)
    return as_typed(f"{section}.{key}", value)


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


REFUSED: Any = object()  # in place of a value that arrives
WRITTEN = st.text(
    OF_TEXT | st.sampled_from("#:{}[]*&!%@`|>?-~='\" \\\\0159eE."), min_size=1, max_size=12
)
TEXT_KEYS = ["run.dir", "run.on_event", "run.wandb_project", "run.prometheus", "data.path",
             "data.tokenizer", "checkpoint.resume", "checkpoint.load_weights_only"]  # fmt: skip


@st.composite
def typed(draw: st.DrawFn) -> tuple[str, str, Any]:
    """A key, what is typed for it, and what must arrive."""
    kind = draw(st.sampled_from(["text", "quoted", "whole", "float", "boolean"]))
    if kind in ("text", "quoted"):
        key, text = draw(st.sampled_from(TEXT_KEYS)), draw(WRITTEN)
        assume(text[0] != "~")
        if kind == "quoted":
            single, double = text.replace("'", "''"), json.dumps(text, ensure_ascii=False)
            return key, draw(st.sampled_from([f"'{single}'", double])), text
        assume(text[0] not in "'\"" and (key != "data.path" or text[0] != "{"))
        assume(key != "run.prometheus" or not re.match(r"[-+ ]*\d", text))
        return key, text, text
    if kind == "whole":
        n = draw(st.integers(0, 99_999_999))
        good = [f"00{n}", f"+{n}", f" {n} ", f"{n:_}", f"0x{n:x}", f"0o{n:o}", f"0b{n:b}"]
        wide = "".join(chr(ord(digit) - ord("0") + 0xFF10) for digit in str(n))
        bad = [f"{n} #1", f"{n}.0", f"{n}e0", f"'{n}'", f"[{n}]", wide, f"-0{n + 1}", f"{n},"]
        spelled = draw(st.sampled_from(good + bad))
        return "train.steps", spelled, n if spelled in good else REFUSED
    if kind == "float":
        x = draw(st.floats(0, 1000))
        spelled = draw(st.sampled_from([f"0{x!r}", f"+{x!r}", repr(x).upper(), f" {x!r}"]))
        return "optimizer.lr", spelled, x
    word = draw(st.sampled_from(["yes", "no", "on", "off", "TRUE", "False"]))
    return "train.deterministic", word, word in ("yes", "on", "TRUE")


SIZES = st.sampled_from([1, 1, 1, 2, 2, 4, 7, 0, -1, 2**20, 2**31 - 2, 2**31 - 1, 2**31, 10**30])
AXES = ["tp", "pp", "dp_shard", "dp_replicate", "cp", "ep", "stages_per_rank", "tp_pieces",
        "micro_batch_size"]  # fmt: skip
ONE = PROPERTIES["parallel"]["layouts"]["items"]["properties"]
OTHER_KEYS = st.sampled_from(["schedule", "zero_stage", "layers_per_stage", "fsdp_unit"])


@st.composite
def layouts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A list for parallel.layouts, often one that fits 8 ranks."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        axes = draw(st.dictionaries(st.sampled_from(AXES), SIZES, max_size=2))
        if not draw(st.integers(0, 3)):
            key = draw(OTHER_KEYS)
            axes[key] = draw(fitting(ONE[key]))
        found.append({"dp_shard": 1, **axes})
    return found


NUMBERS = {
    "plan": ["--gpus", "--guide", "--layouts"],
    "rehearse": ["--gpus", "--rank"],
    "timeline": ["--stages", "--micro-batches", "--stages-per-rank"],
}


@st.composite
def command_line(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A tool, and options with numbers of any size."""
    tool = draw(st.sampled_from(list(NUMBERS)))
    given = draw(st.lists(st.sampled_from(NUMBERS[tool]), max_size=4, unique=True))
    options = [word for name in given for word in (name, str(draw(SIZES)))]
    if tool == "timeline":
        usual = ["--stages", "2", "--micro-batches", "4"]
        return tool, ["--schedule", draw(st.sampled_from(list(SCHEDULES))), *usual, *options]
    flag = {"plan": "--search", "rehearse": "--races"}[tool]
    flags = [flag] if draw(st.booleans()) else []
    return tool, [str(LAPTOP), "parallel.dp_shard=-1", *flags, *options]


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
    names = draw(st.lists(st.sampled_from(RUN_NAMES), min_size=1, max_size=6, unique=True))
    return [
        as_typed(f"{section}.{key}", draw(fitting(PROPERTIES[section][key])))
        for section, key in names
    ]
