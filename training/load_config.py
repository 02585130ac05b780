"""A YAML file and `section.key=value` overrides → `Config`. Unknown keys and wrong types are errors; nothing is guessed."""

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Any

import yaml

from errors import UserError
from training.config import Config


class _Loader(yaml.SafeLoader):
    """Without YAML 1.1's numbers to base 60, in which `run.profile=10:13` is 613."""


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | str:
    return node.value if ":" in node.value else loader.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def load_config(path: str, overrides: list[str]) -> Config:
    """Read `path`, apply `overrides` in order, and build the configuration (each section checks itself).

    Raises:
        UserError: an unreadable file, an unknown section or key, a missing key, or a value of the wrong type.
    """
    try:
        raw = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(
            "configuration file", path, error.strerror or str(error), "give a readable YAML file, e.g. from configs/"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError("configuration file", path, f"is not YAML: {' '.join(str(error).split())}", "mend the file") from None
    if not isinstance(raw, dict) or not all(isinstance(section, dict) for section in raw.values()):
        raise UserError("configuration file", path, "must be a mapping of sections to keys", "see configs/laptop.yaml")
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise UserError("command line", override, "is not section.key=value", "write for example train.steps=100")
        try:
            raw.setdefault(section, {})[key] = yaml.load(text, _Loader)
        except yaml.YAMLError:
            raise UserError(name, text, "is not a YAML value", "quote it") from None
    return _build(raw)


def dump_config(config: Config) -> str:
    """The whole resolved configuration as YAML, defaults included; `load_config` reads it back to the same."""
    plain = dataclasses.asdict(config)
    plain["optimizer"]["betas"] = list(config.optimizer.betas)
    return yaml.safe_dump(plain, sort_keys=False)


def _build(raw: dict[str, Any]) -> Config:
    sections = {field.name: field.type for field in dataclasses.fields(Config)}
    for section in raw:
        if section not in sections:
            _unknown(section, raw[section], list(sections))
    built = {}
    for section, cls in sections.items():
        given = dict(raw.get(section, {}))
        hints = typing.get_type_hints(cls)
        values = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every section is a dataclass
            if field.name in given:
                values[field.name] = _convert(f"{section}.{field.name}", given.pop(field.name), hints[field.name])
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise UserError(f"{section}.{field.name}", None, "is missing and has no default", "add it to the file")
        for key, value in given.items():
            _unknown(f"{section}.{key}", value, [f"{section}.{field.name}" for field in dataclasses.fields(cls)])  # type: ignore[arg-type]
        built[section] = cls(**values)  # type: ignore[operator]
    return Config(**built)


def _unknown(name: str, value: Any, known: list[str]) -> None:
    close = difflib.get_close_matches(name, known, n=1)
    raise UserError(
        name, value, "there is no such key", f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
    )


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as type `hint`, or a UserError that says what the key takes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value in arguments and type(value) in {type(a) for a in arguments}:
            return value
        raise UserError(name, value, "is not one of its values", f"choose one of {list(arguments)}")
    if origin in (types.UnionType, typing.Union):
        for option in arguments:
            try:
                return _convert(name, value, option)
            except UserError:
                continue
    elif hint is type(None) and value is None:
        return None
    elif hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-5 as a string
        except ValueError:
            pass
    elif hint in (int, bool, str) and type(value) is hint:
        return value
    elif origin is list and isinstance(value, list):
        return [_convert(name, item, arguments[0]) for item in value]
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_convert(name, item, argument) for item, argument in zip(value, arguments, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {_convert(name, k, arguments[0]): _convert(name, v, arguments[1]) for k, v in value.items()}
    raise UserError(name, value, f"has the type {type(value).__name__}", f"give a value of type {_describe(hint)}")


def _describe(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
