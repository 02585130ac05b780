"""The report page's part about experts: how evenly tokens spread over them
(runtime/records/expert_load.py defines the figures), and the losses of the routers."""

from collections.abc import Callable, Iterator
from typing import Any

from runtime.records.tracker import is_number
from tools.report.charts import Series, escape
from tools.report.run import Run

COLUMNS = {
    "layer": ("layer", "{:.0f}"),
    "entropy": ("entropy, 1 is even", "{:.3f}"),
    "largest_share": ("largest share, 1 is even", "{:.2f}"),
    "dead": ("experts without a token", "{:.0f}"),
}


def expert_charts(run: Run, by_step: Callable[..., str]) -> Iterator[str]:
    """Charts of the most uneven layer and of the losses; each is empty if it has no data.
    `by_step`: line_chart, for charts over steps."""
    largest = Series("largest expert", "c4", run.points("largest_expert_share"))
    yield by_step("Load of experts", "times an even share", [largest], zero=True)
    losses = [
        Series("balance", "c1", run.points("router_balance_loss")),
        Series("z", "c2", run.points("router_z_loss")),
    ]
    yield by_step("Router losses", "all layers, weighted", losses, zero=True)


def expert_table(run: Run) -> str:
    """The load of each layer at the newest record that has it; empty if none has."""
    for record in reversed(run.records):
        rows = list(_rows(record.get("experts_by_layer")))
        if rows:
            head = "".join(f"<th>{name}</th>" for name, _ in COLUMNS.values())
            body = "".join(
                f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
            )
            since = "Of the tokens since the logged step before it."
            return (
                f"<section><h2>Load of experts at step {escape(record.get('step', '?'))}</h2>"
                f'<p class="muted">{since}</p><div class="scroll"><table class="figures">'
                f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
            )
    return ""


def _rows(by_layer: Any) -> Iterator[list[str]]:
    """The cells of each layer; none if the entry was not written by a run."""
    columns = [by_layer.get(key) for key in COLUMNS] if isinstance(by_layer, dict) else []
    if not columns or not all(isinstance(column, list) for column in columns):
        return
    for values in zip(*columns, strict=False):
        if all(map(is_number, values)):
            forms = (form for _, form in COLUMNS.values())
            yield [form.format(value) for form, value in zip(forms, values, strict=True)]
