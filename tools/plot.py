"""Draws a run's loss curve: `python -m tools.plot RUN --out FILE.png`.

Reads RUN/metrics.jsonl, and draws the training loss of every logged step and the held-out loss
where it was measured. The dashed line is the loss of a unigram model, which knows only each token's
frequency; its value is stored with the prepared data, and omitted if the data no longer exists.
Dotted lines are boundaries between stages of data.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from data.dataset import open_data
from errors import UserError
from runtime.records.events import read_events
from runtime.records.tracker import is_number, is_record, whole_lines
from tools.command import CommandParser, run_command
from tools.report.run import boundaries
from training.load_config import load_config

BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#6b7280"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The logged steps of `run`, in order."""
    path = run / "metrics.jsonl"
    try:
        records = whole_lines(path, path.read_bytes().splitlines(), is_record)
    except OSError as error:
        why = f"metrics.jsonl cannot be read ({error.strerror})"
        raise UserError("RUN", str(run), why, "give a run folder: run.dir") from None
    if not any(is_number(record.get("loss"), finite=False) for record in records):
        raise UserError("RUN", str(path), "it has no logged step yet", "wait for the first one")
    return records


def read_stages(run: Path) -> dict[float, str]:
    try:
        return boundaries(read_events(run))
    except FileNotFoundError:
        return {}
    except OSError as error:
        why = f"events.jsonl cannot be read ({error.strerror})"
        raise UserError("RUN", str(run), why, "make it readable") from None


def unigram_baseline(run: Path) -> float | None:
    """The unigram model's held-out loss in nats per token, or None if the configuration or the data
    no longer exists."""
    try:
        return open_data(
            load_config(str(run / "config.yaml"), []).data, "heldout"
        ).unigram_nats_per_token
    except UserError:
        return None


def draw(
    records: list[dict[str, Any]],
    baseline: float | None,
    title: str,
    stages: Mapping[float, str] = MappingProxyType({}),
) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    train = [(r["step"], r["loss"]) for r in records if is_number(r.get("loss"), finite=False)]
    heldout = [(r["step"], r["eval_loss"]) for r in records if is_number(r.get("eval_loss"))]

    axes.plot(*zip(*train, strict=True), color=BLUE, linewidth=1.4, label="training")
    if heldout:
        axes.plot(
            *zip(*heldout, strict=True),
            color=ORANGE,
            marker="o",
            markersize=5,
            linewidth=0,
            label="held-out",
        )
        step, loss = heldout[-1]
        offset = {"xytext": (0, 9), "textcoords": "offset points"}
        axes.annotate(f"{loss:.2f}", (step, loss), color=ORANGE, ha="center", fontsize=9, **offset)
    if baseline is not None:
        label = f"a unigram model on held-out text: {baseline:.2f}"
        axes.axhline(baseline, color=GREY, linestyle="--", linewidth=1.2, label=label)

    for step, text in stages.items():
        axes.axvline(step, color=GREY, linestyle=":", linewidth=1.2)
        place = {"xytext": (3, -3), "textcoords": "offset points", "va": "top"}
        where = (step, 1.0)
        axes.annotate(
            text.partition(":")[0],
            where,
            xycoords=axes.get_xaxis_transform(),
            color=GREY,
            fontsize=8,
            **place,
        )

    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.plot", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder (run.dir)")
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="the picture to write: .png, .svg or .pdf",
    )
    options = parser.parse_args(arguments)
    try:
        records = read_metrics(options.run)
        if options.out.suffix not in (".png", ".svg", ".pdf"):
            why = "its name does not end in a supported picture format"
            raise UserError("--out", str(options.out), why, "use .png, .svg or .pdf")
        matplotlib.rcParams["svg.hashsalt"] = "lattice"  # the same run gives the same file
        title = f"{options.run.name}: loss over {records[-1]['step']:,} steps"
        figure = draw(records, unigram_baseline(options.run), title, read_stages(options.run))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.out, dpi=150)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
