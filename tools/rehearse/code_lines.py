"""Which files cause what a step does: those of this repository, and FSDP2's."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# They watch; they do not cause.
_OBSERVERS = tuple(
    f"{ROOT}/{name}/" for name in ("benchmarks", "costs", "tools/rehearse", "tools/streams")
)
_FSDP = "/torch/distributed/fsdp/"
FSDP = "FSDP "  # before the name of a file of FSDP2


@cache
def code_file(path: str) -> str | None:
    """The name of a file of this repository, or of FSDP2 (`FSDP …`); None for all others, and for
    those that only watch."""
    if _FSDP in path:
        return f"{FSDP}{Path(path).name}"
    if not path.startswith(f"{ROOT}/") or "/site-packages/" in path:
        return None
    return None if path.startswith(_OBSERVERS) else path.removeprefix(f"{ROOT}/")
