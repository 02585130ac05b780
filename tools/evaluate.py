"""Evaluates a model on tasks: `python -m tools.evaluate --checkpoint DIR --tasks NAME_OR_FILE …`

DIR is a checkpoint of any layout, a run folder (its newest checkpoint is used) or an exported
folder in Hugging Face format. A task is the name of one in tasks/, or the path of a file in the
same format (docs/evaluation.md). The code is that of `train.tasks`, so a run's own numbers come out
again, to rounding. With several processes, the model is sharded over all of them by tensor
parallelism, as by tools.generate:

    torchrun --nproc-per-node 2 -m tools.evaluate --checkpoint DIR --tasks python

--json also writes the log-likelihood of every text. A checkpoint's checksums are verified first.
The exit status is 2 if something is refused.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from errors import UserError
from runtime.checkpoints.trainer_state import read_trainer
from runtime.messages import from_rank_0, on_all_ranks, refuse
from runtime.start.init_distributed import init_distributed
from runtime.tasks.files import read_tasks
from runtime.tasks.rows import TaskRows, log_likelihoods, measures, tokenize
from runtime.tasks.scoring import score_whole
from tools.command import CommandParser, run_command
from tools.generate.load_model import load_model
from tools.huggingface.checkpoint_reader import newest
from tools.huggingface.config import CONFIG, HuggingFaceConfig
from training.precision import DTYPES


def longest(folder: Path) -> int:
    """The length of the model's training sequences, or the longest that its config.json states."""
    if (folder / CONFIG).is_file():
        return HuggingFaceConfig(folder).max_length
    return read_trainer(newest(folder), "--checkpoint").seq_len


def evaluate(options: argparse.Namespace, device: str) -> tuple[list[TaskRows], Any]:
    """The tasks, and the log-likelihood of each text of each example of each. Runs on every rank;
    raises the same UserError on all."""
    for key in ("seq_len", "tokens_at_once"):
        value = getattr(options, key)
        if value is not None and value < 1:
            name = f"--{key.replace('_', '-')}"
            raise UserError(name, value, "it must be at least 1", "give a larger number")
    read = from_rank_0(lambda: read_tasks(options.tasks, "--tasks"), device)
    loaded = load_model(options.checkpoint, DTYPES[options.dtype], device)

    def to_rows() -> tuple[list[TaskRows], int]:
        tokens, rows = loaded.tokenizer.vocab_size, loaded.model.config.vocab_size
        if tokens > rows:
            why = f"its tokenizer has {tokens} tokens, and the model's vocabulary {rows}"
            remedy = "put the tokenizer with which the model was trained into its folder"
            raise UserError("--checkpoint", str(options.checkpoint), why, remedy)
        seq_len = options.seq_len or longest(options.checkpoint)
        return tokenize(read, loaded.tokenizer, seq_len, "--tasks"), seq_len

    tasks, seq_len = on_all_ranks(to_rows, device)
    rows = [row for task in tasks for text in task.texts() for row in text.rows]
    of_rows = score_whole(loaded.model, rows, seq_len, options.tokens_at_once, device)
    return tasks, log_likelihoods(tasks, of_rows)


def table(tasks: list[TaskRows], found: Any) -> str:
    """A line for each task, with its measures."""
    lines = [
        f"{'task':<24}{'examples':>9}{'accuracy per byte':>19}{'accuracy':>10}{'bits/byte':>11}"
    ]
    for task, values in zip(tasks, found, strict=True):
        measured = measures(task, values)
        cells = [
            f"{measured[name]:.1%}" if name in measured else ""
            for name in ("accuracy_per_byte", "accuracy")
        ]
        lines.append(
            f"{task.task.name:<24}{len(task.examples):>9}{cells[0]:>19}{cells[1]:>10}"
            f"{measured['bits_per_byte']:>11.4f}"
        )
    return "\n".join(lines)


def write_json(path: Path, tasks: list[TaskRows], found: Any) -> None:
    content = {
        task.task.name: {**measures(task, values), "log_likelihoods": values}
        for task, values in zip(tasks, found, strict=True)
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        why = f"it cannot be written ({error.strerror})"
        raise UserError("--json", str(path), why, "give another file") from None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m tools.evaluate", description=__doc__)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="a checkpoint, run folder or exported folder",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="NAME_OR_FILE",
        help="names of tasks in tasks/, or files in the same format",
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help="the most tokens of a row (default: the model's sequence length)",
    )
    parser.add_argument(
        "--tokens-at-once",
        type=int,
        default=4096,
        metavar="N",
        help="tokens computed together (default %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="computation dtype (default float32)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all log-likelihoods, in nats"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    device = init_distributed()
    try:
        tasks, found = evaluate(options, device)
        if dist.get_rank() == 0:
            if options.json is not None:
                write_json(options.json, tasks, found)
            print(table(tasks, found))
            sys.stdout.flush()
    except UserError as error:
        refuse(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
