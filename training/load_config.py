"""Build a `Config` from a YAML file and `section.key=value` overrides. Unknown keys and wrong types
are errors; nothing is guessed."""

import dataclasses
import difflib
from typing import Any

from errors import UserError
from settings import no_such_key
from training.config import Config
from yaml_text import MAX_CHARACTERS, NotYaml, dump, parse

SECTIONS: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Config)}
KEYS = {name: [field.name for field in dataclasses.fields(cls)] for name, cls in SECTIONS.items()}


def load_config(path: str, overrides: list[str]) -> Config:
    """Read `path`, apply `overrides` in order, and build the configuration (each section checks
    itself).

    Raises:
        UserError: the file is unreadable, a section or key is unknown, a key is missing, or a value
            is not allowed for its key.
    """
    raw = _read(path)
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and section and dot and key):
            raise UserError(
                "command line",
                override,
                "is not section.key=value",
                "write for example train.steps=100",
            )
        try:
            raw.setdefault(section, {})[key] = parse(text)
        except NotYaml as error:
            raise UserError(name, text, f"is not a YAML value: {error}", "quote it") from None
    return _build(raw)


def dump_config(config: Config) -> str:
    """The whole resolved configuration as YAML, defaults included. `load_config` reads the same
    configuration back."""
    plain = dataclasses.asdict(config)
    plain["optimizer"]["betas"] = list(config.optimizer.betas)
    return dump(plain)


def _read(path: str) -> dict[str, dict[str, Any]]:
    """The file's sections, each a mapping of keys."""
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
        if not isinstance(section, str) or not isinstance(keys, dict):
            raise UserError(
                str(section),
                keys,
                "is not a section with keys",
                f"see configs/laptop.yaml; the file is {path}",
            )
    return raw


def _build(raw: dict[str, dict[str, Any]]) -> Config:
    for section, given in raw.items():
        if section not in SECTIONS:
            close = difflib.get_close_matches(section, SECTIONS, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"choose from {', '.join(SECTIONS)}"
            raise UserError(section or "''", given, "there is no such section", remedy)
        for key, value in given.items():
            if key not in KEYS[section]:
                raise no_such_key(section, str(key), value, KEYS)
    return Config(**{section: cls(**raw.get(section, {})) for section, cls in SECTIONS.items()})
