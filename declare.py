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

A kind (kinds.py) that has settings declares them in its own file, in a class `Settings`:

    @section("model.sliding_window")                   # model/attention/sliding_window.py
    class Settings:
        window: Count                                  # tokens that a token sees

They are a section within the section that selects the kind (`WithKinds`).
"""

import dataclasses
import difflib
import os
import typing
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from errors import UserError, short
from kinds import kinds_in, load_kind

# default upper bound of whole numbers: the product of two still fits torch's 64 bits
LARGEST = 2**31 - 1


def between(least: float, most: float, example: Any = None) -> Any:
    """Declare inclusive bounds of a field. `example`: a usual value, for the message."""
    return Field(ge=least, le=most, examples=None if example is None else [example])


def _at_home(path: str) -> str:
    """Expand a leading ~ or ~user. ($NAME is left to the shell: a file's name may contain it.)"""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        said = "It should begin with a user that this machine knows, or with ./ before the ~"
        raise PydanticCustomError("no_home", said)
    return expanded


Count = Annotated[int, between(1, LARGEST)]
Whole = Annotated[int, between(0, LARGEST)]
Share = Annotated[float, Field(gt=0, le=1e30)]
Width = Annotated[int, between(1, 2**20)]  # of a layer
# Text for the file system, logs and shell tools: one line, without control characters.
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
NonEmpty = Annotated[Text, Field(min_length=1)]
PathText = Annotated[NonEmpty, AfterValidator(_at_home)]
PathOrNone = Annotated[Text, AfterValidator(_at_home)]  # "": none
# Marks a key of the model that changes nothing that a trained model computes, such as the weight of
# a loss. Checkpoints do not store it, so it needs a default.
FREE = "free"

T = TypeVar("T")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def section(name: str) -> Callable[[type[T]], type[T]]:
    """Turn a class into the configuration section `name`: a frozen dataclass that raises UserError
    on invalid values."""

    def decorate(cls: type[T]) -> type[T]:
        # strict: text is not accepted as a number, nor 1 as true. (An int is accepted as a float.)
        config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        built: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=True, config=config)
        validate = built.__init__

        def init(self: Any, /, **values: Any) -> None:
            try:
                validate(self, **values)
            except ValidationError as error:
                raise _explain(name, built.__pydantic_fields__, values, error) from None

        built.__init__ = init
        built.section = name
        return built

    return decorate


class WithKinds:
    """A section with keys that select kinds. The settings of a kind are a section in it:

        @section("model")
        class ModelConfig(WithKinds, attention="model.attention"):   # key: folder of the kinds
            attention: Text = "causal"

        model: {attention: sliding_window, sliding_window: {window: 4096}}

    Only kinds that are selected are imported. `of` returns the settings of one, with their type.
    """

    section: ClassVar[str]
    folders: ClassVar[dict[str, str]]  # of the kinds, by the key that selects them

    def __init_subclass__(cls, **folders: str) -> None:
        cls.folders = folders
        for kind in (kind for folder in folders.values() for kind in kinds_in(folder)):
            if kind in cls.__annotations__:
                raise TypeError(f"{cls.__name__} has two things named {kind}: rename the kind")
            cls.__annotations__[kind] = Any
            setattr(cls, kind, None)

    def find(self, settings: type[T]) -> T | None:
        """The settings of a selected kind, by the class that its file declares; None: it is not
        selected. (A class that derives from it is another kind's.)"""
        return next((own for own in vars(self).values() if type(own) is settings), None)

    def of(self, settings: type[T]) -> T:
        """The settings of a kind that is selected."""
        found = self.find(settings)
        assert found is not None, f"no selected kind has {settings.__module__}.{settings.__name__}"
        return found

    def doubts(self) -> list[str]:
        """What a start warns of: the `doubts` of the settings that have any."""
        found = [value for value in vars(self).values() if hasattr(value, "doubts")]
        return [doubt for each in found for doubt in each.doubts()]

    def select(self, key: str, kinds: Collection[str]) -> None:
        """Make the settings of the kinds that a key selects. Raises UserError if there is no such
        kind, or if one that is not selected has a setting other than its default."""
        folder = self.folders[key]
        known = kinds_in(folder)
        if not set(kinds) <= set(known):
            name, value = f"{self.section}.{key}", getattr(self, key)
            raise UserError(name, value, "there is no such kind", f"choose from {known}")
        for kind in known:
            name, given, made = f"{self.section}.{kind}", getattr(self, kind), None
            if given is not None or kind in kinds:
                made = _made(name, given, settings_class(folder, kind))
            if made is not None and kind not in kinds and not _has_defaults(made):
                remedy = f"leave it out, or set {self.section}.{key}={kind}"
                remedy += f" ({name}= on the command line leaves out the file's)"
                raise UserError(name, given, f"nothing is of kind {kind}", remedy)
            object.__setattr__(self, kind, made if kind in kinds else None)


def settings_class(folder: str, kind: str) -> Any:
    """The class of the settings that the file of a kind declares; None: it has none."""
    return load_kind(folder, kind, "Settings", None)


def _made(name: str, given: Any, declared: Any) -> Any:
    """The settings of a kind, from its section in a file."""
    if declared is not None and isinstance(given, declared):
        return given
    given = {} if given is None else given
    if declared is None and given != {}:
        raise UserError(name, given, "this kind has no settings of its own", "leave it out")
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        keys = ", ".join(f"{name}.{each.name}" for each in dataclasses.fields(declared))
        raise UserError(name, given, "is not a section with keys", f"set its keys: {keys}")
    return declared and declared(**given)


def _has_defaults(settings: Any) -> bool:
    return all(getattr(settings, f.name) == f.default for f in dataclasses.fields(settings))


def keys_of(section: Any) -> Iterator[tuple[str, Any, bool]]:
    """Every key of a section with its full name, its value, and whether it is `FREE`; those of the
    selected kinds too."""
    hints = typing.get_type_hints(type(section), include_extras=True)
    for each in dataclasses.fields(section):
        value = getattr(section, each.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value)
        elif each.type is not Any:  # Any: a kind that is not selected
            is_free = FREE in getattr(hints[each.name], "__metadata__", ())
            yield f"{section.section}.{each.name}", value, is_free


# What a value should do, where pydantic's message does not say it well.
SHOULD = {
    "string_pattern_mismatch": "be one line without control characters",
    "string_unicode": "be text that UTF-8 can write",
}


def _explain(
    section: str, declared: dict[str, Any], given: dict[str, Any], error: ValidationError
) -> UserError:
    """The first of pydantic's errors as a UserError. `declared`: its description of each key."""
    found = error.errors(include_url=False)
    unknown = [e for e in found if e["type"] == "unexpected_keyword_argument"]
    key = str((unknown or found)[0]["loc"][0])
    name, value = f"{section}.{key}", given.get(key)
    if unknown:
        return no_such_key(section, key, value, {section: list(declared)})
    if key not in given:
        return UserError(name, None, "is missing and has no default", "add it to the file")
    # A value that fits none of several types has an error for each. The deepest belong to the type
    # that was probably meant.
    of_key = [e for e in found if e["loc"][0] == key]
    meant = [e for e in of_key if len(e["loc"]) == max(len(e["loc"]) for e in of_key)]
    wrong, why = meant[0]["input"], "is not allowed"
    if wrong is not value:
        why = f"the value {short(wrong)} in it {why}"
    elif value is None:
        why = "has no value"
    should = (SHOULD.get(e["type"]) or e["msg"].partition(" should ")[2] for e in meant)
    remedy = f"it should {', or '.join(dict.fromkeys(should))}"
    if examples := declared[key].examples:
        remedy += f", for example {examples[0]}"
    return UserError(name, value, why, remedy)


def no_such_key(section: str, key: str, value: Any, known: dict[str, list[str]]) -> UserError:
    """Return the error for a key that does not exist. `known`: the valid keys of every section."""
    close = [f"{other}.{key}" for other, keys in known.items() if key in keys]
    if not close:
        near = difflib.get_close_matches(key, known[section], n=1)
        close = [f"{section}.{name}" for name in near]
    every = ", ".join(f"{section}.{name}" for name in known[section])
    remedy = f"did you mean {' or '.join(close)}?" if close else f"choose from {every}"
    return UserError(f"{section}.{key}", value, "there is no such key", remedy)
