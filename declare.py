"""Define sections of the configuration: frozen dataclasses whose fields carry their bounds, checked
however an object is created: from a file, in Python, or by `dataclasses.replace`.

    @section("train")
    class TrainConfig:
        steps: Whole                                   # 0 or more
        lr: Annotated[float, between(0, 1000)]         # bounds; NaN and infinity never pass
        dtype: Literal["bfloat16", "float32"]          # one of these

An invalid value raises a UserError that names the key as in the file (`train.steps`). pydantic
checks the bounds, and configs/schema.json is generated from them (tools/schema.py). Like errors.py,
this module may be imported anywhere.
"""

import dataclasses
import difflib
import inspect
import os
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from errors import UserError, short

# default upper bound of whole numbers: the product of two still fits torch's 64 bits
LARGEST = 2**31 - 1


def between(least: float, most: float, example: Any = None) -> Any:
    """Declare inclusive bounds of a field. `example`: a usual value, for the message."""
    return Field(ge=least, le=most, examples=None if example is None else [example])


def _whole(value: Any) -> Any:
    if type(value) is not int:  # True and 1.0 equal 1 in Python and would pass as 1
        raise ValueError("is not an allowed value")
    return value


def _at_home(path: str) -> str:
    """Expand a leading ~ or ~user. ($NAME is left to the shell: a file's name may contain it.)"""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise PydanticCustomError("no_home", "no such user")
    return expanded


Count = Annotated[int, between(1, LARGEST)]
Whole = Annotated[int, between(0, LARGEST)]
Share = Annotated[float, Field(gt=0, le=1e30)]
# Text for the file system, logs and shell tools: one line, without control characters.
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
NonEmpty = Annotated[Text, Field(min_length=1)]
PathText = Annotated[NonEmpty, AfterValidator(_at_home)]
PathOrNone = Annotated[Text, AfterValidator(_at_home)]  # "": none
OneOf = BeforeValidator(_whole)  # for a Literal of whole numbers: refuses true

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def section(name: str) -> Callable[[type[T]], type[T]]:
    """Turn a class into the configuration section `name`: a frozen dataclass that raises UserError
    on invalid values."""

    def decorate(cls: type[T]) -> type[T]:
        # strict: text is not accepted as a number, nor 1 as true. (An int is accepted as a float.)
        config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        built: Any = pydantic.dataclasses.dataclass(cls, frozen=True, config=config)
        validate = built.__init__

        def init(self: Any, *args: Any, **values: Any) -> None:
            try:
                validate(self, *args, **values)
            except ValidationError as error:
                positional = dict(
                    zip((field.name for field in dataclasses.fields(built)), args, strict=False)
                )
                raise _explain(name, built, positional | values, error) from None

        fields = inspect.signature(built)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        init.__signature__ = fields.replace(parameters=[itself, *fields.parameters.values()])  # type: ignore[attr-defined]
        built.__init__ = init
        return built

    return decorate


def _explain(section: str, cls: Any, given: dict[str, Any], error: ValidationError) -> UserError:
    """Turn pydantic's errors into a UserError about the first problem."""
    found = sorted(
        error.errors(include_url=False), key=lambda e: e["type"] != "unexpected_keyword_argument"
    )
    place = found[0]["loc"][0]
    # For a positional argument, the place is its number.
    key = place if isinstance(place, str) else dataclasses.fields(cls)[place].name
    # A value that fits none of several types has an error for each type. The deepest error belongs
    # to the type that was probably meant.
    of_key = sorted(
        (e for e in found if e["loc"][0] == place), key=lambda e: (-len(e["loc"]), _is_of_type(e))
    )
    first = of_key[0]
    if first["type"] == "unexpected_keyword_argument":
        return no_such_key(
            section, key, given[key], {section: [field.name for field in dataclasses.fields(cls)]}
        )
    if key not in given:
        why = "is missing and has no default"
        return UserError(f"{section}.{key}", None, why, "add it to the file")
    hint = typing.get_type_hints(cls)[key]
    several = _is_of_type(first) and len(of_key) > 1 and len(of_key[1]["loc"]) == len(first["loc"])
    why, remedy = _words(first, hint, several)
    if not several and first["input"] is not given[key]:
        inner = first["input"]
        why = f"the value {short(inner)} in it {why}"
    examples = cls.__pydantic_fields__[key].examples
    if examples:
        remedy += f", for example {', '.join(map(str, examples))}"
    value = given[key]
    return UserError(
        f"{section}.{key}", list(value) if isinstance(value, tuple) else value, why, remedy
    )


def _is_of_type(error: ErrorDetails) -> bool:
    return error["type"].endswith(("_type", "literal_error"))


def _words(error: ErrorDetails, hint: Any, several: bool) -> tuple[str, str]:
    """Return why a value is invalid, and the remedy."""
    kind, limits = error["type"], error.get("ctx", {})
    if not several:
        match kind:
            case "greater_than_equal":
                return f"must be at least {limits['ge']:g}", f"give {limits['ge']:g} or more"
            case "greater_than":
                return f"must be above {limits['gt']:g}", f"give more than {limits['gt']:g}"
            case "less_than_equal":
                return f"must be at most {limits['le']:,}", f"give {limits['le']:,} or less"
            case "less_than":
                return f"must be below {limits['lt']:,}", f"give less than {limits['lt']:,}"
            case "finite_number":
                return "is not a finite number", "give a number"
            case "string_too_short":
                return "is empty", "give a name"
            case "string_too_long":
                return f"is longer than {limits['max_length']} characters", "give a shorter one"
            case "string_pattern_mismatch":
                return "contains a line break or another control character", "remove it"
            case "string_unicode":
                return "is not text: it cannot be written in UTF-8", "use other characters"
            case "no_home":
                why = "begins with the home of a user that this machine does not know"
                return why, "write the whole path, or ./~NAME for a folder of that name"
            case "literal_error" | "value_error":
                return "is not an allowed value", f"choose one of {list(typing.get_args(hint))}"
    if error["input"] is None:
        return "has no value", f"give a value of type {_describe(hint)}"
    return (
        f"has the type {type(error['input']).__name__}",
        f"give a value of type {_describe(hint)}",
    )


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


def _describe(hint: Any) -> str:
    if len(of := alternatives(hint)) > 1:
        return " | ".join(map(_describe, of))
    if hint is type(None):
        return "null"
    is_plain = isinstance(hint, type) and not typing.get_args(hint)
    return hint.__name__ if is_plain else str(hint).replace("typing.", "")


# Names that other projects use for our keys.
SYNONYMS = {
    "learning_rate": "lr",
    "max_lr": "lr",
    "min_lr": "min_lr_ratio",
    "clip_grad": "grad_clip",
    "max_grad_norm": "grad_clip",
    "warmup": "warmup_steps",
    "lr_scheduler": "schedule",
    "adam_epsilon": "eps",
    "batch_size": "global_batch_size",
    "mbs": "micro_batch_size",
    "gradient_accumulation_steps": "micro_batch_size",
    "sequence_length": "seq_len",
    "max_position_embeddings": "seq_len",
    "max_steps": "steps",
    "num_steps": "steps",
    "train_iters": "steps",
    "precision": "dtype",
    "recompute": "activation_checkpointing",
    "hidden_size": "dim",
    "d_model": "dim",
    "num_hidden_layers": "num_layers",
    "n_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "n_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_query_groups": "num_kv_heads",
    "intermediate_size": "ffn_dim",
    "ffn_hidden_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
    "tensor_parallel": "tp",
    "pipeline_parallel": "pp",
    "context_parallel": "cp",
    "context_parallel_size": "cp",
    "cp_size": "cp",
    "fsdp": "dp_shard",
    "dp": "dp_shard",
    "data_parallel": "dp_shard",
    "zero": "zero_stage",
    "save_interval": "interval",
    "load": "resume",
    "output_dir": "dir",
    "dataset": "path",
    "gc_freq": "gc_interval",
    "manual_gc_interval": "gc_interval",
}


def no_such_key(section: str, key: str, value: Any, known: dict[str, list[str]]) -> UserError:
    """Return the error for a key that does not exist. `known`: the valid keys of every section."""
    meant = SYNONYMS.get(key.lower().replace("-", "_"), key)
    elsewhere = [f"{other}.{meant}" for other, keys in known.items() if meant in keys]
    here = known[section]
    if meant in here:
        close = [f"{section}.{meant}"]
    else:
        close = elsewhere or [
            f"{section}.{name}" for name in difflib.get_close_matches(key, here, n=1)
        ]
    every = ", ".join(f"{section}.{name}" for name in here)
    remedy = f"did you mean {close[0]}?" if close else f"choose from {every}"
    return UserError(f"{section}.{key}", value, "there is no such key", remedy)
