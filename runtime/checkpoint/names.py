"""The names in a folder of checkpoints; imports nothing that takes time, unlike run_folder.py."""

import re
from pathlib import Path

NAME = re.compile(r"step-(\d{8})")
LATEST = "latest"
MANIFEST = "manifest.json"  # the last file of a checkpoint (manifest.py)
AFTER_COMMIT = "after_commit"  # a folder: how far checkpoint.after_commit is (runtime/monitor/)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of a folder, oldest first."""
    return sorted(
        path
        for path in folder.glob("step-*")
        if NAME.fullmatch(path.name) and (path / MANIFEST).is_file()
    )


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def has_command(checkpoint: Path) -> bool:
    """Whether checkpoint.after_commit runs for this checkpoint, which must then stay."""
    return any((checkpoint.parent / AFTER_COMMIT).glob(f"{checkpoint.name}.*.running"))
