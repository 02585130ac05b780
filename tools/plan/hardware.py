"""Finds a device by name, or reads it from a file of rates."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from errors import UserError
from hardware import DEVICES, Device

GB = 1e9


def find_device(name: str) -> Device:
    """The known device `name`, or the one that a JSON file describes:
    `{"based_on": "h100", "matmul_efficiency": 0.7, …}`."""
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".json"):
        raise UserError(
            "--device",
            name,
            "is not a known device",
            f"choose one of {', '.join(DEVICES)}, or give a JSON file",
        )
    try:
        given = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "--device", name, f"cannot be read: {error}", "give a file as in docs/planning.md"
        ) from None
    return _device(name, given)


def _device(file: str, given: Any) -> Device:
    based_on = given.get("based_on") if isinstance(given, dict) else None
    if not isinstance(based_on, str) or based_on not in DEVICES:
        shown = based_on if isinstance(given, dict) else given
        why = "must name the device whose rates the file changes"
        raise UserError(f"{file}: based_on", shown, why, f"choose one of {', '.join(DEVICES)}")
    base = DEVICES[based_on]
    known = {field.name: field.type for field in dataclasses.fields(Device)}
    changes = {key: value for key, value in given.items() if key != "based_on"}
    for key, value in changes.items():
        if key not in known:
            raise UserError(
                f"{file}: {key}", value, "is not a known rate", f"choose from {', '.join(known)}"
            )
        if why := _fault(key, known[key], value):
            raise UserError(f"{file}: {key}", value, why, f"{base.name} has {getattr(base, key)}")
    return dataclasses.replace(base, **{"name": Path(file).stem, **changes})


def _fault(key: str, kind: Any, value: Any) -> str:
    """The fault of a number or name in a file, or an empty string if there is none."""
    if kind is str:
        return "" if isinstance(value, str) and value else "must be a string"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return "must be a whole number" if kind is int else "must be a number"
    if not 0 < value < float("inf"):
        return "must be a positive number"
    return "is a fraction, so at most 1" if key.endswith("_efficiency") and value > 1 else ""
