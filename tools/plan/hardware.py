"""Finds a device by name, or reads it from a file of rates."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from errors import UserError
from hardware import DEVICES, Device
from runtime.schema import Name, Strict, first_problem, load_json

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
    remedy = f"choose one of {', '.join(DEVICES)}, or give a JSON file as in docs/planning.md"
    if not name.endswith(".json"):
        raise UserError("--device", name, "is not a known device", remedy)
    remedy = f"give based_on, one of {', '.join(DEVICES)}, and the rates to change, of "
    remedy += ", ".join(RATES)
    try:
        given = FileOfRates.model_validate(load_json(Path(name).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:  # also: not text, or not JSON
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise UserError("--device", name, f"is no file of rates: {problem}", remedy) from None
    rates = given.model_dump(exclude_unset=True)
    device = replace(DEVICES[rates.pop("based_on")], **{"name": Path(name).stem, **rates})
    if device.room <= 0:
        why = f"reserved_bytes={device.reserved_bytes:g} leave nothing of it to a run"
        remedy = "give both in bytes, and fewer reserved_bytes"
        raise UserError(f"{name}.memory_bytes", device.memory_bytes, why, remedy)
    return device
