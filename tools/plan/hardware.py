"""Finds a device by name, or reads it from a file of rates."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from errors import UserError
from hardware import DEVICES, Device
from runtime.schema import Name, Strict

GB = 1e9


def _rate(name: str, kind: Any) -> tuple[Any, None]:
    """What a file may have for a field of `Device`, as pydantic expects it."""
    most = 1 if name.endswith("_efficiency") else None
    return Name if kind is str else Annotated[kind, Field(gt=0, le=most)], None


RATES = {field.name: _rate(field.name, field.type) for field in fields(Device)}
FileOfRates = create_model("FileOfRates", __base__=Strict, based_on=Literal[*DEVICES], **RATES)  # type: ignore[call-overload]


def find_device(name: str) -> Device:
    """The known device `name`, or the one that a JSON file describes:
    `{"based_on": "h100", "matmul_efficiency": 0.7, …}`."""
    if name in DEVICES:
        return DEVICES[name]
    devices = ", ".join(DEVICES)
    if not name.endswith(".json"):
        remedy = f"choose one of {devices}, or give a JSON file"
        raise UserError("--device", name, "is not a known device", remedy)
    try:
        given = FileOfRates.model_validate(json.loads(Path(name).read_text(encoding="utf-8")))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join([name, *map(str, problem["loc"])])
        remedy = f"give based_on, one of {devices}, and the rates to change, of {', '.join(RATES)}"
        raise UserError(key, problem["input"], problem["msg"], remedy) from None
    except (OSError, ValueError, RecursionError) as error:
        remedy = "give a file as in docs/planning.md"
        raise UserError("--device", name, f"cannot be read: {error}", remedy) from None
    rates = given.model_dump(exclude_unset=True)
    device = replace(DEVICES[rates.pop("based_on")], **{"name": Path(name).stem, **rates})
    if device.room <= 0:
        why = f"reserved_bytes={device.reserved_bytes:g} leave nothing of it to a run"
        remedy = "give both in bytes, and fewer reserved_bytes"
        raise UserError(f"{name}.memory_bytes", device.memory_bytes, why, remedy)
    return device
