"""Read tasks: one JSON object per line, all of one form.

    {"context": "import json\\ntext = json.", "choices": ["dumps(", "sleep("], "answer": 0}
    {"text": "def area(width, height):\\n    return width * height\\n"}

Of the first form, the model scores each choice as the continuation of the context; `answer` is the
number of the right one, from 0. Of the second, it scores the whole text.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from data.contents import compression, first_bytes, known
from data.files import Report
from errors import UserError
from runtime.schema import Natural, Strict, first_problem, load_json

SUFFIX = ".jsonl"
BUNDLED = Path(__file__).parent / "tasks"
NAME = re.compile(r"[A-Za-z0-9_.-]+")  # as part of a metric's name
REMEDY = "docs/evaluation.md describes the format"
NonEmpty = Annotated[str, Field(min_length=1)]


class _Choices(Strict):
    context: str
    choices: Annotated[list[NonEmpty], Field(min_length=2)]
    answer: Natural


class _Text(Strict):
    text: NonEmpty


@dataclass(frozen=True)
class Example:
    """Texts to be scored as continuations of `context`, and the number of the right one; None: of
    the only text, there is nothing to choose."""

    place: str  # file and line, for messages
    context: str
    texts: tuple[str, ...]
    answer: int | None


@dataclass(frozen=True)
class Task:
    name: str  # of its metrics: the file's name without the suffix
    examples: tuple[Example, ...]

    @property
    def has_choices(self) -> bool:
        return self.examples[0].answer is not None


def read_tasks(named: Sequence[str], key: str) -> list[Task]:
    """Read the tasks that `key` names: bundled ones by name (`python`), others by path
    (`mine/facts.jsonl`).

    Raises UserError, which names the file and the line.
    """
    tasks = [read_task(_path(name, key), key) for name in named]
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            why = f"two tasks would have the metrics task/{name}/…"
            raise UserError(key, list(named), why, "name each once, or rename a file")
    return tasks


def _path(name: str, key: str) -> Path:
    path = Path(name) if name.endswith(SUFFIX) else BUNDLED / f"{name}{SUFFIX}"
    if not os.path.isfile(path):  # an OSError is no file either
        bundled = ", ".join(sorted(file.stem for file in BUNDLED.glob(f"*{SUFFIX}")))
        why = "there is no such file" if name.endswith(SUFFIX) else "there is no bundled task"
        raise UserError(
            key, name, why, f"choose from {bundled}, or give a file of your own, ….jsonl"
        )
    if not NAME.fullmatch(path.stem):
        why = "the file's name is part of its metrics' names"
        raise UserError(key, name, why, "use letters, digits, and any of _ . - in it")
    return path


def read_task(path: Path, key: str) -> Task:
    """Read one file. Raises UserError."""
    try:
        head = first_bytes(path)
        if found := known(head) or (compression(head) and ("compressed", "decompress a copy")):
            raise UserError(key, str(path), f"it is {found[0]}", found[1])
        # not splitlines: JSON strings may contain other characters at which it would split
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key, str(path), f"it cannot be read: {error}", REMEDY) from None
    examples, report = [], Report()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(_example(line, f"{path}, line {number}", key))
            except UserError as error:
                report.fault("line", error)
    report.check(key, str(path))
    if not examples:
        raise UserError(key, str(path), "it has no examples", REMEDY)
    for example in examples:
        if (example.answer is None) != (examples[0].answer is None):
            why = "its form differs from the first line's: a file has either choices or texts"
            raise UserError(key, example.place, why, "put them into two files")
    return Task(path.stem, tuple(examples))


def _example(line: str, place: str, key: str) -> Example:
    try:
        content = load_json(line)
        if isinstance(content, dict) and "text" in content:
            text = _Text.model_validate(content).text
            return Example(place, "", (text,), None)
        found = _Choices.model_validate(content)
    except ValidationError as error:
        raise UserError(key, place, f"it has an error ({first_problem(error)})", REMEDY) from None
    except (ValueError, RecursionError) as error:
        raise UserError(key, place, f"it is not JSON ({error})", REMEDY) from None
    if found.answer >= len(found.choices):
        why = f"its answer is {found.answer}, and its choices are 0 to {len(found.choices) - 1}"
        raise UserError(key, place, why, REMEDY)
    return Example(place, found.context, tuple(found.choices), found.answer)
