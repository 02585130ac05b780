"""Build a `Config` from a YAML file and `section.key=value` overrides. Unknown keys and wrong types
are errors; nothing is guessed."""

import dataclasses
import difflib
import typing
from pathlib import Path
from typing import Any

from declare import alternatives, no_such_key
from errors import UserError
from settings.config import SECTIONS, Config
from settings.data_stages import data_stages, read_entries
from settings.yaml_text import MAX_CHARACTERS, NotYaml, dump, parse

KEYS = {name: [field.name for field in dataclasses.fields(cls)] for name, cls in SECTIONS.items()}
HINTS = {name: typing.get_type_hints(cls) for name, cls in SECTIONS.items()}


def load_config(path: str, overrides: list[str]) -> Config:
    """Read `path`, apply `overrides` in order, and build the configuration (each section checks
    itself, in every data stage). An override without data_stages.K changes the sections of the
    file, so it holds until a data stage sets the key.

    Raises:
        UserError: the file is unreadable, a section or key is unknown, a key is missing, or a value
            is not allowed for its key.
    """
    raw = _read(path)
    for override in overrides:
        _apply(override, raw)
    return _build(raw)


def load_saved(folder: Path) -> Config:
    """The configuration that a run wrote to its folder. (An older version wrote `stages` for
    `data_stages`.) Raises UserError."""
    raw = _read(str(folder / "config.yaml"))
    if "stages" in raw:
        raw["data_stages"] = raw.pop("stages")
    return _build(raw)


def _apply(override: str, raw: dict[str, Any]) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    whole = name in ("data_stages", "stages")
    if not (equals and (whole or (section and dot and key))):
        raise UserError(
            "command line",
            override,
            "is not section.key=value",
            "write for example train.steps=100",
        )
    if whole:
        raw[name] = _value(name, text)
    elif section == "data_stages":
        _set_in_data_stage(raw, name, text)
    else:
        raw.setdefault(section, {})[key] = _value(name, text, section, key)


def dump_config(config: Config) -> str:
    """The whole resolved configuration as YAML, defaults included. `load_config` reads the same
    configuration back."""
    plain: dict[str, Any] = settings_of(config)
    plain["optimizer"]["betas"] = list(config.optimizer.betas)
    if config.data_stages:
        plain["data_stages"] = list(config.data_stages)
    return dump(plain)


def settings_of(config: Config) -> dict[str, dict[str, Any]]:
    """The value of each key, by section."""
    return {section: dataclasses.asdict(getattr(config, section)) for section in SECTIONS}


def changed_between(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> list[str]:
    """Each setting that differs: `train.steps 400 → 110`."""
    return [
        f"{section}.{key} {before[section][key]} → {value}"
        for section, values in after.items()
        for key, value in values.items()
        if before[section][key] != value
    ]


def _value(name: str, text: str, section: str = "", key: str = "") -> Any:
    """The value of `text`, typed for the setting `name`. It is read as in a file, except for a key
    that takes text: its value is exactly `text`, unless that is in quotes, or is a number or a
    {mapping} or [list] that the key takes as well."""
    types = {typing.get_origin(one) or one for one in alternatives(HINTS.get(section, {}).get(key))}
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


def _set_in_data_stage(raw: dict[str, Any], name: str, text: str) -> None:
    """Apply an override: data_stages.1.train.seq_len, or data_stages.1.from_step."""
    stages = raw.get("data_stages") or []
    number, _, rest = name.removeprefix("data_stages.").partition(".")
    section, _, key = rest.partition(".")
    if not isinstance(stages, list) or number not in map(str, range(1, len(stages) + 1)):
        why = f"the file has {len(stages) if isinstance(stages, list) else 0} data stages"
        raise UserError(name, text, why, "write for example data_stages.1.train.seq_len=1024")
    at, value = int(number) - 1, _value(name, text, section, key)
    if not section:
        stages[at] = value
    elif isinstance(stages[at], dict):
        keys = stages[at].get(section)
        of_section = keys if isinstance(keys, dict) else {}
        stages[at][section] = {**of_section, key: value} if key else value


def _read(path: str) -> dict[str, Any]:
    """The file's sections, each a mapping of keys, and its list of data stages."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            why = f"is longer than {MAX_CHARACTERS:,} characters: is it a configuration?"
            raise UserError("configuration file", path, why, "give a YAML file, e.g. from configs/")
        raw = parse(text)
    except OSError as error:
        remedy = "give a readable YAML file, e.g. from configs/"
        raise UserError("configuration file", path, error.strerror or str(error), remedy) from None
    except NotYaml as error:
        raise UserError("configuration file", path, str(error), "correct the file") from None
    except ValueError as error:  # the file is not UTF-8, or the path contains NUL
        raise UserError(
            "configuration file", path, f"is not a text file: {error}", "give a YAML file"
        ) from None
    if not isinstance(raw, dict):
        raise UserError(
            "configuration file",
            path,
            "must be a mapping of sections to keys",
            "see configs/laptop.yaml",
        )
    for section, keys in raw.items():
        if section in ("data_stages", "stages"):
            continue
        if not isinstance(section, str) or not isinstance(keys, dict):
            raise UserError(
                str(section),
                keys,
                "is not a section with keys",
                f"see configs/laptop.yaml; the file is {path}",
            )
    return raw


def _build(raw: dict[str, Any]) -> Config:
    entries = read_entries(raw.pop("data_stages", None))
    for section, given in raw.items():
        if section not in SECTIONS:
            close = difflib.get_close_matches(section, [*SECTIONS, "data_stages"], n=1)
            names = ", ".join([*SECTIONS, "data_stages"])
            remedy = f"did you mean {close[0]}?" if close else f"choose from {names}"
            raise UserError(section or "''", given, "there is no such section", remedy)
        for key, value in given.items():
            if key not in KEYS[section]:
                raise no_such_key(section, str(key), value, KEYS)
    built = {section: cls(**raw.get(section, {})) for section, cls in SECTIONS.items()}
    config = Config(**built, data_stages=entries)
    data_stages(config)  # raises if an entry does not fit
    return config
