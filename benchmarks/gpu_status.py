"""What a row of a GPU benchmark says about itself (gpu_rows.py). No torch here: the process that
writes the page does not use the GPU."""

from typing import Any

MEASURED, OUT_OF_MEMORY, NO_TIME, NOT_INSTALLED = (
    "measured",
    "out of memory",
    "not measured (time)",
    "not installed",
)
FAILED, NEEDS = "failed", "not measured"


def why_wrong(row: dict[str, Any]) -> str:
    """What makes the exit status 1: the row is wrong, or is one of ours and failed. Empty:
    neither."""
    if row.get("right") is False:
        return "is wrong"
    return row["status"] if row.get("ours", True) and row["status"].startswith(FAILED) else ""
