"""From examples to rows of tokens, and from the rows' log-likelihoods to measures.

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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from data.tokenizer import Tokenizer, clean
from errors import UserError
from runtime.evaluation.files import Example, Task, read_tasks
from settings.config import Config


@dataclass(frozen=True)
class Row:
    """A sequence, of which the last `scored` targets count."""

    tokens: np.ndarray  # [inputs + 1] int32: inputs are all but the last, targets all but the first
    scored: int

    @property
    def inputs(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Text:
    """A text to be scored."""

    rows: tuple[Row, ...]
    num_bytes: int  # in UTF-8


@dataclass(frozen=True)
class TaskRows:
    """A task in tokens."""

    task: Task
    examples: tuple[tuple[Text, ...], ...]  # of each example, its texts

    def texts(self) -> list[Text]:
        return [text for texts in self.examples for text in texts]


def open_tasks(config: Config, tokenizer: Path) -> list[TaskRows]:
    """Read and tokenize the run's tasks, with the data's tokenizer. Raises UserError."""
    if not config.train.tasks:
        return []
    tasks = read_tasks(config.train.tasks, "train.tasks")
    return tokenize(
        tasks, Tokenizer.load(tokenizer, "data.path"), config.train.seq_len, "train.tasks"
    )


def tokenize(tasks: Sequence[Task], tokenizer: Tokenizer, seq_len: int, key: str) -> list[TaskRows]:
    """Tokenize tasks for rows of at most `seq_len` inputs. `key`: what named the tasks.

    Raises UserError if a choice has no token, or more than `seq_len`.
    """
    return [_tokenize_task(task, tokenizer, seq_len, key) for task in tasks]


def _tokenize_task(task: Task, tokenizer: Tokenizer, seq_len: int, key: str) -> TaskRows:
    first = tokenizer.bos_id if tokenizer.bos_id >= 0 else tokenizer.eos_id
    contexts = tokenizer.encode_arrays([clean(each.context) for each in task.examples])
    wholes = iter(
        tokenizer.encode_arrays(
            [clean(each.context) + clean(text) for each in task.examples for text in each.texts]
        )
    )
    examples = []
    for example, context in zip(task.examples, contexts, strict=True):
        texts = []
        for text in example.texts:
            whole = np.concatenate(([first], next(wholes))).astype(np.int32)
            if example.answer is None:
                rows = windows(whole, seq_len)
            else:
                rows = (_choice(example, text, context, whole, seq_len, key),)
            texts.append(Text(rows, len(clean(text).encode())))
        examples.append(tuple(texts))
    return TaskRows(task, tuple(examples))


def _choice(
    example: Example, text: str, context: np.ndarray, whole: np.ndarray, seq_len: int, key: str
) -> Row:
    scored = len(whole) - 1 - shared(context, whole[1:])
    if scored < 1 or scored > seq_len:
        why = f"its choice {text[:100]!r} has {scored} tokens after the context, and a row has "
        why += f"between 1 and {seq_len}"
        raise UserError(key, example.place, why, "write a longer choice, or a shorter one")
    return Row(whole[-(seq_len + 1) :], scored)


def shared(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the longest beginning that both have."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def windows(tokens: np.ndarray, seq_len: int) -> tuple[Row, ...]:
    """Cut tokens into rows of at most `seq_len` inputs that score every token but the first."""
    starts = range(0, len(tokens) - 1, seq_len)
    parts = [tokens[start : start + seq_len + 1] for start in starts]
    return tuple(Row(part, len(part) - 1) for part in parts)


def log_likelihoods(tasks: Sequence[TaskRows], of_rows: Sequence[float]) -> list[list[list[float]]]:
    """Sum the rows' log-likelihoods, in nats, to those of each text of each example of each task.
    `of_rows`: of all rows, in order."""
    values = iter(of_rows)
    return [
        [[sum(next(values) for _ in text.rows) for text in texts] for texts in task.examples]
        for task in tasks
    ]


def measures(task: TaskRows, found: Sequence[Sequence[float]]) -> dict[str, float]:
    """A task's measures, from the log-likelihood of each text of each example.

    accuracy_per_byte: the share of examples whose right choice has the largest log-likelihood per
        byte, which favours neither short choices nor a tokenizer (Gao 2021,
        https://blog.eleuther.ai/multiple-choice-normalization/).
    accuracy: the same by the log-likelihood itself.
    bits_per_byte: of all texts, or of all right choices; it changes smoothly where accuracy jumps
        (Bhagia et al. 2024, https://arxiv.org/abs/2412.04403).
    """
    sizes = [[text.num_bytes for text in texts] for texts in task.examples]
    answers = [example.answer or 0 for example in task.task.examples]
    right = zip(found, sizes, answers, strict=True)
    nats = [(values[answer], size[answer]) for values, size, answer in right]
    bits = -sum(value for value, _ in nats) / sum(size for _, size in nats) / math.log(2)
    if not task.task.has_choices:
        return {"bits_per_byte": bits}
    per_byte = [
        [value / num_bytes for value, num_bytes in zip(*pair, strict=True)]
        for pair in zip(found, sizes, strict=True)
    ]
    return {
        "accuracy_per_byte": _accuracy(per_byte, answers),
        "accuracy": _accuracy(found, answers),
        "bits_per_byte": bits,
    }


def _accuracy(scores: Sequence[Sequence[float]], answers: Sequence[int]) -> float:
    """The share of examples whose answer has the largest score, the first of equal ones; NaN if a
    score is."""
    if any(map(math.isnan, chain.from_iterable(scores))):
        return math.nan
    chosen = [max(range(len(each)), key=each.__getitem__) for each in scores]
    return sum(map(int.__eq__, chosen, answers)) / len(answers)
