"""Evaluates a model on tasks: `python -m tools.evaluate --checkpoint DIR --tasks NAME_OR_FILE …`

DIR is a checkpoint of any layout, a run folder (its newest checkpoint is used) or an exported
folder in Hugging Face format. A task is the name of a bundled one, or the path of a file in the
same format (docs/evaluation.md). The code is that of `train.tasks`, so a run's own numbers come out
again, to rounding. With several processes, the model is sharded over all of them by tensor
parallelism, as by tools.generate:

    torchrun --nproc-per-node 2 -m tools.evaluate --checkpoint DIR --tasks python

--json also writes the log-likelihood of every text. A checkpoint's checksums are verified first.
The exit status is 2 if something is refused.
"""

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runtime.agreement import from_rank_0, on_all_ranks
from runtime.evaluation.rows import read_tasks, results, tokenize
from runtime.evaluation.scoring import score_whole
from settings.config import DTYPES
from tools.command import CommandParser, at_least, check_json, run_command, table, write_json
from tools.generate.load_model import load_model, on_ranks

TOKENS_AT_ONCE = 4096


def evaluate(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Of each task: its measures, and the log-likelihood of each text of each example. Runs on
    every rank; raises the same UserError on all."""
    at_least(1, seq_len=options.seq_len)
    read = from_rank_0(lambda: read_tasks(options.tasks, "--tasks"))
    loaded = load_model(options.checkpoint, DTYPES[options.dtype], device)
    seq_len = options.seq_len or loaded.max_length
    about = loaded.tokenizer, seq_len, "--tasks"
    tasks = on_all_ranks(lambda: [tokenize(task, *about) for task in read])
    rows = [row for task in tasks for row in task.rows]
    of_rows = score_whole(loaded.model, rows, seq_len, TOKENS_AT_ONCE, device)
    return {
        name: {**measures, "log_likelihoods": nats}
        for name, (measures, nats) in results(tasks, of_rows).items()
    }


def describe(found: dict[str, Any]) -> str:
    """A line for each task, with its measures."""
    rows = [("task", "examples", "accuracy per byte", "accuracy", "bits/byte")]
    for name, of_task in found.items():
        by_byte, accuracy = (
            f"{of_task[measure]:.1%}" if measure in of_task else ""
            for measure in ("accuracy_per_byte", "accuracy")
        )
        examples, bits = len(of_task["log_likelihoods"]), of_task["bits_per_byte"]
        rows.append((name, str(examples), by_byte, accuracy, f"{bits:.4f}"))
    return table(rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m tools.evaluate", description=__doc__)
    parser.required("--checkpoint", Path, "DIR", "a checkpoint, run folder or exported folder")
    tasks = "names of bundled tasks (runtime/evaluation/tasks/), or files in the same format"
    parser.required("--tasks", str, "NAME_OR_FILE", tasks, nargs="+")
    length = "the most tokens of a row (default: the model's sequence length)"
    parser.option("--seq-len", int, "N", length)
    parser.option("--dtype", "float32", None, "computation dtype", choices=DTYPES)
    parser.option("--json", Path, "FILE", "also write all log-likelihoods, in nats")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()

    def work(device: str) -> None:
        from_rank_0(lambda: check_json(options.json))
        found = evaluate(options, device)
        if dist.get_rank() == 0:
            print(describe(found), flush=True)  # first: the file may be on a full disk
            write_json(options.json, found)

    on_ranks(work)


if __name__ == "__main__":
    run_command(main)
