"""Building blocks for pydantic models that validate JSON from outside, and a one-line description
of what is invalid."""

import json
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_JSON_BYTES = 1 << 30
MAX_INT = (1 << 63) - 1

Natural = Annotated[int, Field(ge=0, le=MAX_INT)]
Name = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Strict(BaseModel):
    """Base model without conversions (no number from a string or from true) or unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def load_json(text: str) -> Any:
    """Parse JSON; NaN and Infinity, which are not JSON, are refused. Raises ValueError or
    RecursionError."""
    if len(text) > MAX_JSON_BYTES:
        raise ValueError("is too long")
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def first_problem(error: ValidationError) -> str:
    """Return the place and the kind of the first problem. The invalid value is left out, as it may
    be very long."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part)[:100] for part in problem["loc"])
    return ascii(f"{place}: {problem['msg']}" if place else problem["msg"])[1:-1]
