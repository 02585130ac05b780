"""What JSON from outside is held against: the words that its models are made of, and one line that
says what is wrong."""

import json
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_JSON_BYTES = 1 << 30
MAX_INT = (1 << 63) - 1

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Name = Annotated[str, Field(min_length=1, max_length=1000, pattern=r"^[^\x00-\x1f\x7f]*$")]


class Strict(BaseModel):
    """Nothing is converted (no number from a string, none from true), no key unknown or missing."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def load_json(text: str) -> Any:
    """Raises ValueError or RecursionError. NaN and Infinity, which are no JSON, are refused."""
    if len(text) > MAX_JSON_BYTES:
        raise ValueError("is too long")
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def first_problem(error: ValidationError) -> str:
    """Where the first one is, and what. What was found is not repeated: it may be very long."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part)[:100] for part in problem["loc"])
    return ascii(f"{place}: {problem['msg']}" if place else problem["msg"])[1:-1]
