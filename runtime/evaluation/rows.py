"""From files of examples to rows of tokens, and from the rows' log-likelihoods to measures.

A task is a file of JSON lines, all of one form:

    {"context": "import json\\ntext = json.", "choices": ["dumps(", "sleep("], "answer": 0}
    {"text": "def area(width, height):\\n    return width * height\\n"}

Of the first form, the model scores each choice as the continuation of the context; `answer` is the
number of the right one, from 0. Of the second, it scores the whole text.

    context "x = json."      tokens   bos x ▁= ▁json .                     ┐ the longest beginning
    with the choice "load("  tokens   bos x ▁= ▁json . load (              ┘ that both share
                             inputs   bos x ▁= ▁json . load                of the row
                             targets                   load (              whose log p is summed

A row begins with the token that begins a document (bos), or if the tokenizer has none with the one
that ends the document before (eos), as documents do in training. The context is tokenized by itself
and together with the choice; the choice's tokens are those after the longest beginning that both
have in common. So every byte of a choice is scored, even where the tokenizer joins the end of the
context and the beginning of the choice in one token. (Where it does not, these are the tokens that
lm-evaluation-harness scores, https://github.com/EleutherAI/lm-evaluation-harness, which takes as
many tokens as the context has by itself.)

A row has at most `seq_len` inputs: of a longer one the beginning of the context is cut off. A text
that is scored whole is cut into windows, in each of which the first input is the last target of
the one before, like the sequences of training and the harness's rolling windows. So each token is
scored once.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from data.tokenizer import Tokenizer, clean
from errors import UserError, is_file, raise_passing
from runtime.schema import Natural, Strict, first_problem, load_json
from settings.config import Config

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
class Row:
    """A sequence, of which the last `scored` targets count."""

    tokens: np.ndarray  # [inputs + 1] int32: inputs are all but the last, targets all but the first
    scored: int

    @property
    def inputs(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Example:
    """Texts to be scored as continuations of `context`, and the number of the right one; None: of
    the only text, there is nothing to choose."""

    place: str  # file and line, for messages
    context: str
    texts: tuple[str, ...]
    answer: int | None
    rows: Sequence[list[Row]] = field(default=(), repr=False)  # of each text, once tokenized


@dataclass(frozen=True)
class Task:
    name: str  # of its metrics: the file's name without the suffix
    examples: tuple[Example, ...]

    @property
    def rows(self) -> list[Row]:
        return [row for example in self.examples for rows in example.rows for row in rows]


def read_tasks(named: Sequence[str], key: str) -> list[Task]:
    """Read the tasks that `key` names: bundled ones by name (`python`), others by path
    (`mine/facts.jsonl`).

    Raises UserError, which names the file and the line.
    """
    tasks = [read_task(_path(name, key), key) for name in named]
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        why = f"two tasks would have the metrics task/{twice}/…"
        raise UserError(key, list(named), why, "name each once, or rename a file")
    return tasks


def _path(name: str, key: str) -> Path:
    path = Path(name) if name.endswith(SUFFIX) else BUNDLED / f"{name}{SUFFIX}"
    try:
        is_there = is_file(path)
    except (OSError, ValueError) as error:  # a name that no file can have
        raise_passing(error)
        is_there = False
    if not is_there:
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
        # not splitlines: JSON strings may contain other characters at which it would split
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise_passing(error)
        raise UserError(key, str(path), f"it cannot be read: {error}", REMEDY) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    examples = [_example(line, f"{path}, line {number}", key) for number, line in numbered]
    odd = next((e for e in examples if (e.answer is None) != (examples[0].answer is None)), None)
    if odd or not examples:
        why = "it has both choices and texts" if odd else "it has no examples"
        raise UserError(key, odd.place if odd else str(path), why, REMEDY)
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


def open_tasks(config: Config, tokenizer: Path) -> list[Task]:
    """Read and tokenize the run's tasks, with the data's tokenizer. Raises UserError."""
    if not config.train.tasks:
        return []
    tasks = read_tasks(config.train.tasks, "train.tasks")
    loaded = Tokenizer.load(tokenizer, "data.path")
    return [tokenize(task, loaded, config.train.seq_len, "train.tasks") for task in tasks]


def tokenize(task: Task, tokenizer: Tokenizer, seq_len: int, key: str) -> Task:
    """Give the examples of a task their rows, of at most `seq_len` inputs. `key`: what named the
    task.

    Raises UserError if a choice has no token, or more than `seq_len`.
    """
    first = tokenizer.bos_id if tokenizer.bos_id >= 0 else tokenizer.eos_id
    pairs = [(clean(each.context), clean(text)) for each in task.examples for text in each.texts]
    wholes = iter(tokenizer.encode_arrays([context + text for context, text in pairs]))
    contexts = tokenizer.encode_arrays([clean(each.context) for each in task.examples])
    examples = []
    for example, context in zip(task.examples, contexts, strict=True):
        rows = []
        for text in example.texts:
            whole = np.concatenate(([first], next(wholes))).astype(np.int32)
            if example.answer is None:
                starts = range(0, len(whole) - 1, seq_len)
                windows = (whole[start : start + seq_len + 1] for start in starts)
                rows.append([Row(window, len(window) - 1) for window in windows])
            else:
                scored = len(whole) - 1 - _shared(context, whole[1:])
                if not 1 <= scored <= seq_len:
                    why = f"its choice {text[:100]!r} has {scored} tokens after the context, and a "
                    why += f"row has between 1 and {seq_len}"
                    raise UserError(key, example.place, why, "write a longer or shorter choice")
                rows.append([Row(whole[-(seq_len + 1) :], scored)])
        examples.append(replace(example, rows=rows))
    return Task(task.name, tuple(examples))


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the longest beginning that both have."""
    length = min(len(one), len(other))
    return int(np.cumprod(one[:length] == other[:length]).sum())


def results(
    tasks: Sequence[Task], of_rows: Sequence[float]
) -> dict[str, tuple[dict[str, float], list[list[float]]]]:
    """Of each task, by name: its measures, and the log-likelihood of each text of each example, in
    nats; from those of all rows of all tasks, in order."""
    values, found = iter(of_rows), {}
    for task in tasks:
        nats = [[sum(next(values) for _ in rows) for rows in each.rows] for each in task.examples]
        found[task.name] = _measures(task, nats), nats
    return found


def _measures(task: Task, found: Sequence[Sequence[float]]) -> dict[str, float]:
    """A task's measures, from the log-likelihood of each text of each example.

    accuracy_per_byte: the share of examples whose right choice has the largest log-likelihood per
        byte, which favours neither short choices nor a tokenizer (Gao 2021,
        https://blog.eleuther.ai/multiple-choice-normalization/).
    accuracy: the same by the log-likelihood itself.
    bits_per_byte: of all texts, or of all right choices; it changes smoothly where accuracy jumps
        (Bhagia et al. 2024, https://arxiv.org/abs/2412.04403).
    """
    scores = [np.array(values) for values in found]  # of each example: of its texts, in nats
    sizes = [np.array([len(clean(t).encode()) for t in each.texts]) for each in task.examples]
    answers = [example.answer or 0 for example in task.examples]
    nats = sum(each[answer] for each, answer in zip(scores, answers, strict=True))
    num_bytes = sum(each[answer] for each, answer in zip(sizes, answers, strict=True))
    bits = float(-nats / num_bytes / math.log(2))
    if task.examples[0].answer is None:
        return {"bits_per_byte": bits}
    per_byte = [score / size for score, size in zip(scores, sizes, strict=True)]
    return {
        "accuracy_per_byte": _accuracy(per_byte, answers),
        "accuracy": _accuracy(scores, answers),
        "bits_per_byte": bits,
    }


def _accuracy(scores: list[np.ndarray], answers: list[int]) -> float:
    """The share of examples whose answer has the largest score, the first of equal ones; NaN if a
    score is."""
    if any(np.isnan(each).any() for each in scores):
        return math.nan
    right = [each.argmax() == answer for each, answer in zip(scores, answers, strict=True)]
    return float(sum(right) / len(right))
