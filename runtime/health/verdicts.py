"""What an examination finds (examine.py); the monitor (monitor/) imports it, and nothing heavy."""

from dataclasses import dataclass, field

TRANSIENT, PERSISTENT, REPRODUCIBLE, NOT_EXAMINED = VERDICTS = (
    "transient",
    "persistent",
    "reproducible",
    "not examined",
)


@dataclass(frozen=True)
class Verdict:
    """The result of an examination, the same on every rank."""

    verdict: str
    why: str
    ranks: list[int] = field(default_factory=list)  # among which the fault is
    is_sure: bool = False  # every one of them computes wrongly
