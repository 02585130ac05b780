"""Devices by name, or from a file of rates."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from errors import UserError
from hardware import DEVICES, Device

GB = 1e9


def find_device(name: str) -> Device:
    """A device of the list, or a JSON file: `{"based_on": "h100", "matmul_efficiency": 0.7, …}`."""
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".json"):
        raise UserError(
            "--device",
            name,
            "there is no such device",
            f"choose of {', '.join(DEVICES)}, or give a JSON file",
        )
    try:
        given = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "--device", name, f"cannot be read: {error}", "give a file as docs/planning.md shows"
        ) from None
    return _device(name, given)


def _device(file: str, given: Any) -> Device:
    based_on = given.get("based_on") if isinstance(given, dict) else None
    if not isinstance(based_on, str) or based_on not in DEVICES:
        shown = based_on if isinstance(given, dict) else given
        why = "must name the device that it changes"
        raise UserError(f"{file}: based_on", shown, why, f"one of {', '.join(DEVICES)}")
    base = DEVICES[based_on]
    known = {field.name: field.type for field in dataclasses.fields(Device)}
    changes = {key: value for key, value in given.items() if key != "based_on"}
    for key, value in changes.items():
        if key not in known:
            raise UserError(
                f"{file}: {key}", value, "there is no such rate", f"choose of {', '.join(known)}"
            )
        if why := _fault(key, known[key], value):
            raise UserError(f"{file}: {key}", value, why, f"{base.name} has {getattr(base, key)}")
    return dataclasses.replace(base, **{"name": Path(file).stem, **changes})


def _fault(key: str, kind: Any, value: Any) -> str:
    """What is wrong with a number or name of a file; empty: nothing."""
    if kind is str:
        return "" if isinstance(value, str) and value else "must be a text"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return "must be a whole number" if kind is int else "must be a number"
    if not 0 < value < float("inf"):
        return "must be a positive number"
    return "is a part of a rate, and at most 1" if key.endswith("_efficiency") and value > 1 else ""
