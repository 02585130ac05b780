"""The interface of a place to which a run's numbers are written, and what several of them need."""

from typing import Any

# one logged step: "step" and the measurements; None for those that are not known
Record = dict[str, Any]


class Tracker:
    """Interface: `log` gets each logged step's record, in step order except after `went_back`."""

    name = ""

    def log(self, record: Record) -> None:
        raise NotImplementedError

    def committed(self, event: dict[str, Any]) -> None:
        """A checkpoint was committed; `event` is that of the save. Called at the next logged step,
        by the main thread: the thread that saves must not wait for a tracker."""

    def went_back(self, step: int, reached: int) -> None:
        """The run was at step `reached` and continues from `step`; the steps between come again."""

    def close(self, failed: bool) -> None:
        """The process ends."""


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record that are known. A number of one layer is named like
    `experts_by_layer/entropy/017`."""
    found = {name: value for name, value in record.items() if isinstance(value, int | float)}
    by_layer = record.get("experts_by_layer", {})
    for name, values in by_layer.items():
        if name != "layer":
            for layer, value in zip(by_layer["layer"], values, strict=True):
                found[f"experts_by_layer/{name}/{layer:03d}"] = value
    return found
