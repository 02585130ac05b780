"""Build a `Config` from a YAML file and `section.key=value` overrides. Unknown keys and wrong types
are errors; nothing is guessed."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any

from declare import WithKinds, keys_of, no_such_key, settings_class
from errors import UserError, raise_passing
from kinds import kinds_in
from settings.config import SECTIONS, Config
from settings.data_stages import data_stages, read_entries
from settings.moved import at_new_places, old_names
from settings.yaml_text import NotYaml, dump, parse

MAX_CHARACTERS = 2**17  # in a file; real configurations have a few thousand
KEYS = {name: [field.name for field in dataclasses.fields(cls)] for name, cls in SECTIONS.items()}
HINTS = {name: typing.get_type_hints(cls) for name, cls in SECTIONS.items()}
# each section's kinds, with the folder of its file
KINDS = {
    name: {kind: folder for folder in cls.folders.values() for kind in kinds_in(folder)}
    for name, cls in SECTIONS.items()
    if issubclass(cls, WithKinds)
}


def load_config(path: str, overrides: list[str]) -> Config:
    """Read `path`, apply `overrides` in order, and build the configuration (each section checks
    itself, in every data stage). An override without data_stages.K changes the sections of the
    file, so it holds until a data stage sets the key.

    Raises:
        UserError: the file is unreadable, a section or key is unknown, a key is missing, or a value
            is not allowed for its key.
    """
    raw = _moved(_read(path))
    for override in overrides:
        _apply(override, raw)
    return _build(raw)


def load_section(name: str, path: str, overrides: list[str]) -> Any:
    """One section of a file, with its overrides. The others may be wrong. Raises UserError."""
    raw = _moved({name: _read(path).get(name, {})})
    for override in overrides:
        if override.startswith(f"{name}."):
            _apply(override, raw)
    _check_keys(raw)
    return SECTIONS[name](**raw[name])


def load_saved(folder: Path) -> Config:
    """The configuration that a run wrote to its folder. (An older version wrote `stages` for
    `data_stages`, and keys that have moved since.) Raises UserError."""
    raw = _read(str(folder / "config.yaml"))
    if "stages" in raw:
        raw["data_stages"] = raw.pop("stages")
    return _build(_moved(raw))


def dump_config(config: Config) -> str:
    """The whole resolved configuration as YAML, defaults included. `load_config` reads the same
    configuration back."""
    entries = {"data_stages": list(config.data_stages)} if config.data_stages else {}
    return dump(settings_of(config) | entries)


def settings_of(config: Config) -> dict[str, Any]:
    """The value of each key, by section; those of the selected kinds in sections within."""
    return {
        name: {
            key: value
            for key, value in dataclasses.asdict(getattr(config, name)).items()
            if value is not None or key not in KINDS.get(name, {})
        }
        for name in SECTIONS
    }


def changed_between(before: Config, after: Config, sections: Iterable[str]) -> list[str]:
    """Each setting of these sections that differs: `train.steps 400 → 110`."""
    old = {key: value for name in SECTIONS for key, value, _ in keys_of(getattr(before, name))}
    return [
        f"{key} {old.get(key)} → {value}"
        for name in sections
        for key, value, _ in keys_of(getattr(after, name))
        if old.get(key) != value
    ]


def _moved(raw: dict[Any, Any]) -> dict[Any, Any]:
    """The content of a file with moved keys where they are now."""
    return {
        name: at_new_places(name, given) if isinstance(given, dict) else given
        for name, given in raw.items()
    }


def _read(path: str) -> dict[Any, Any]:
    """The content of the file, which must be a mapping."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise NotYaml(f"is longer than {MAX_CHARACTERS:,} characters")
        raw = parse(text)
        why = "must be a mapping of sections to keys"
    except OSError as error:
        raise_passing(error)
        raw, why = None, error.strerror or str(error)
    except ValueError as error:  # NotYaml, not UTF-8, or NUL in the path
        raw, why = None, str(error)
    if not isinstance(raw, dict):
        remedy = "give a readable YAML file, such as configs/laptop.yaml"
        raise UserError("configuration file", path, why, remedy)
    return raw


def _apply(override: str, raw: dict[Any, Any]) -> None:
    """Set a key of a section or of a kind's section in it (model.sliding_window.window), a key or
    section of a data stage (data_stages.1.train.seq_len, data_stages.1.from_step), or the list of
    data stages."""
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not ((section and key) or name in ("data_stages", "stages")):
        remedy = "write for example train.steps=100"
        raise UserError("command line", override, "is not section.key=value", remedy)
    at: Any = raw
    if section == "data_stages" and dot:
        entries = raw.get(section) or []
        number, _, rest = key.partition(".")
        if not isinstance(entries, list) or number not in map(str, range(1, len(entries) + 1)):
            why = f"the file has {len(entries) if isinstance(entries, list) else 0} data stages"
            raise UserError(name, text, why, "write for example data_stages.1.train.seq_len=1024")
        at, (section, _, key) = entries[int(number) - 1], rest.partition(".")
    else:  # (in a data stage old names are not read)
        key = old_names(section).get(key, key)
    *above, last = [section, *key.split(".", 1)] if key else [section]
    why, remedy = "is not in a section with keys", "correct the file, or write for example "
    wrong = UserError(name, text, why, remedy + "train.steps=100")
    value = _value(name, text, section, key)
    for outer in above:
        inner = at.get(outer, {}) if isinstance(at, dict) else None
        if inner is None and outer in KINDS.get(section, {}):
            inner = {}  # `adamw:` without keys
        if not isinstance(inner, dict):
            raise wrong
        at[outer] = {**inner}  # a copy: YAML's aliases may share it
        at = at[outer]
    if not isinstance(at, dict):
        raise wrong
    at[last] = value


def _value(name: str, text: str, section: str, key: str) -> Any:
    """The value of `text`, typed for the setting `name`. It is read as in a file, except for a key
    that takes text: its value is exactly `text`, unless that is in quotes, or is a number or a
    {mapping} or [list] that the key takes as well."""
    hint = HINTS.get(section, {}).get(key)
    kind, _, own = key.partition(".")
    if own and kind in KINDS.get(section, {}):
        declared = settings_class(KINDS[section][kind], kind)
        hint = typing.get_type_hints(declared).get(own) if declared else None
    is_union = typing.get_origin(hint) in (UnionType, typing.Union)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    types = {typing.get_origin(one) or one for one in alternatives}
    bracket = text.lstrip().startswith(tuple("{" * (dict in types) + "[" * (tuple in types)))
    verbatim = str in types and not bracket
    try:
        value = parse(text, comments=False)
    except NotYaml as error:
        if verbatim:
            return text
        remedy = "correct it, or quote what is text"
        raise UserError(name, text, f"is not a YAML value: {error}", remedy) from None
    quoted = isinstance(value, str) and text.startswith(("'", '"'))
    return text if verbatim and not quoted and type(value) not in types - {str, dict} else value


def _check_keys(raw: dict[Any, Any]) -> None:
    for section, given in raw.items():
        if section not in SECTIONS:
            known = [*SECTIONS, "data_stages"]
            close = difflib.get_close_matches(str(section), known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
            raise UserError(str(section) or "''", given, "there is no such section", remedy)
        if not isinstance(given, dict):
            why, remedy = "is not a section with keys", "see configs/laptop.yaml"
            raise UserError(section, given, why, remedy)
        for key, value in given.items():
            if key not in KEYS[section]:
                raise no_such_key(section, str(key), value, KEYS)


def _build(raw: dict[Any, Any]) -> Config:
    entries = raw.pop("data_stages", None)
    _check_keys(raw)
    built = {section: cls(**raw.get(section, {})) for section, cls in SECTIONS.items()}
    config = Config(**built, data_stages=read_entries(entries))
    stages, tasks = data_stages(config), config.train.tasks  # raises if an entry does not fit
    if tasks and not any(stage.config.train.eval_interval for stage in stages):
        why = "the run never evaluates: train.eval_interval is 0"
        raise UserError("train.tasks", tasks, why, "set train.eval_interval, such as 100")
    return config
