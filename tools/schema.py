"""Writes the configuration's JSON schema, with which editors complete and check configurations.

    python -m tools.schema --out configs/schema.json

The line `# yaml-language-server: $schema=schema.json` in a configuration file points editors to it
(VS Code, Neovim, JetBrains). Types, bounds and defaults come from the section classes; descriptions
come from the docstrings of the classes and from the comments of the fields.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from declare import settings_class
from settings.config import SECTIONS, Config
from settings.data_stages import BEGINS, CHANGEABLE
from settings.layouts import MAX_LAYOUTS, OF_TRAIN
from settings.load import KINDS
from tools.command import CommandParser, reports_errors, run_command, writes


def schema() -> dict[str, Any]:
    """The schema of a whole configuration file."""
    whole = TypeAdapter(dataclasses.make_dataclass("Config", SECTIONS.items())).json_schema()
    whole["description"] = Config.__doc__
    for name, cls in SECTIONS.items():
        properties = described(whole["$defs"][cls.__name__], cls)["properties"]
        for kind, folder in KINDS.get(name, {}).items():
            if (own := settings_class(folder, kind)) is None:
                del properties[kind]
            else:
                properties[kind] = described(TypeAdapter(own).json_schema(), own)
                del properties[kind]["title"]  # only the name of its class
    whole["additionalProperties"] = False
    whole["required"] = [
        name for name, cls in SECTIONS.items() if whole["$defs"][cls.__name__].get("required")
    ]
    whole["properties"]["data_stages"] = data_stages()
    properties = some_of("parallel") | some_of("train", OF_TRAIN)  # of an item of parallel.layouts
    del properties["layouts"]
    properties["dp_shard"]["minimum"] = 1  # not -1, which would fit many worlds
    layouts = {"items": closed(properties), "maxItems": MAX_LAYOUTS}
    whole["$defs"]["ParallelConfig"]["properties"]["layouts"] |= layouts
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def described(one: dict[str, Any], cls: Any) -> dict[str, Any]:
    """The schema of a section, with the comments of its keys."""
    for key, comment in comments(cls).items():
        one["properties"][key]["description"] = comment
    for each in one["properties"].values():
        each.pop("title", None)  # only repeats the key, capitalized
    return one


def closed(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The schema of an object that has no other properties than these."""
    return {"type": "object", "additionalProperties": False, "properties": properties, **others}


def some_of(section: str, keys: Iterable[str] = ()) -> dict[str, Any]:
    """The properties that the schema has for these keys of a section; for all without any."""
    cls = SECTIONS[section]
    names = keys or [field.name for field in dataclasses.fields(cls)]
    return {key: {"$ref": f"#/$defs/{cls.__name__}/properties/{key}"} for key in names}


def data_stages() -> dict[str, Any]:
    """The schema of the list of data stages (settings/data_stages.py)."""
    begins = {
        "from_step": "the data stage begins after this many steps",
        "from_token": "or: it begins with the first step before which so many tokens were read",
    }
    properties: dict[str, Any] = {
        name: {"description": said, "type": "integer", "minimum": 1, "maximum": BEGINS[name]}
        for name, said in begins.items()
    }
    properties |= {name: closed(some_of(name, keys)) for name, keys in CHANGEABLE.items()}
    said = "from where on which settings change (docs/data_stages.md)"
    one = closed(properties, oneOf=[{"required": [name]} for name in begins])
    return {"description": said, "type": "array", "items": one}


def comments(cls: Any) -> dict[str, str]:
    """Key → the comment on its line, or else the comment lines above it."""
    found, above = {}, ""
    keys = {field.name for field in dataclasses.fields(cls)}
    declared = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    for line in (line for base in declared for line in inspect.getsource(base).splitlines()):
        field = re.match(r"    (\w+): [^#]*(?:# (.*))?$", line)
        if field and field[1] in keys:
            found[field[1]] = field[2] or above
            above = ""
        else:
            comment = re.match(r"    # (.*)$", line)
            above = f"{above} {comment[1]}".strip() if comment else ""
    return {key: comment for key, comment in found.items() if comment}


@reports_errors
def main() -> None:
    parser = CommandParser(prog="python -m tools.schema", description=__doc__)
    parser.required("--out", Path, "FILE", "the file to write")
    out = parser.parse_args().out
    with writes("--out", out):
        out.write_text(text(), encoding="utf-8")


def text() -> str:
    """The content of configs/schema.json."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    run_command(main)
