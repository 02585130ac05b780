"""The page at the end of each part of `make bench-gpu`: what was wrong, then every estimate beside
what was measured, or why it was not; then every row.

Nothing here imports torch: the process that writes the page does not use the GPU. A row has a
`name` and a `status`, one of the texts below; if its `right` is false, or if it is one of ours and
failed, then the exit status is 1.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

MEASURED, OUT_OF_MEMORY, NO_TIME = "measured", "out of memory", "not measured (time)"
FAILED, NEEDS = "failed", "not measured"  # how other statuses begin
Row = dict[str, Any]
WHOLE = ("exit status 0", "exit status 1")  # how a program ends that has run to its end

FILE = Path(__file__).parent / "estimates.yaml"
NO_GPU = "no GPU"  # in place of the name of the device
INFINITY = float("inf")
# The numbers of a row that the page and the programs print, beside its time.
NUMBERS = {"tokens_per_second": ",.0f", "mfu": ".1%", "fraction_of_copy": ".0%",
           "fraction_of_peak": ".1%", "over_three_products": ".3f", "memory_over_eager": ".3f",
           "over_planned": ".3f", "over_rehearsed": ".3f", "idle_share": ".1%",
           "kernel": ""}  # fmt: skip


class Estimate(NamedTuple):
    """One estimate of estimates.yaml, whose head says what these are."""

    part: str
    what: str
    source: str
    least: float = 0.0
    most: float = INFINITY
    row: str = ""
    number: str = ""
    device: str = ""
    why_not: str = ""

    @property
    def interval(self) -> str:
        least, most = (f"{bound:.4g}" for bound in (self.least, self.most))
        if self.most == INFINITY:
            return f"≥ {least}"
        return f"≤ {most}" if self.least == 0 else least if least == most else f"{least} to {most}"


@cache
def estimates() -> tuple[Estimate, ...]:
    """All of them; one with `each` stands for one with each combination of these words."""
    import yaml  # not needed to say that it is missing

    raw = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    sources, found = raw.pop("sources"), []
    for part, listed in raw.items():
        for given in listed:
            words = given.pop("each", {})
            given["source"] = sources[given["source"]] + given.pop("note", "")
            for chosen in itertools.product(*words.values()):
                named = dict(zip(words, chosen, strict=True))
                filled = {k: v.format(**named) for k, v in given.items() if isinstance(v, str)}
                found.append(Estimate(part, **given | filled))
    return tuple(found)


def measures(result: Mapping[str, Any]) -> bool:
    return result["about"]["device"] != NO_GPU


def find(estimate: Estimate, result: Mapping[str, Any]) -> dict[str, Any]:
    """The estimate beside what was measured; `verdict` says why if nothing was. `ratio` is to the
    nearest bound: 1 inside. `result`: what run.py writes as JSON."""
    row = next((row for row in result["rows"] if row["name"] == estimate.row), None)
    value, ratio, device = None, None, result["about"]["device"]
    if estimate.why_not:
        verdict = f"{NEEDS}: {estimate.why_not}"
    elif not measures(result):
        verdict = f"{NEEDS}: needs a GPU and full sizes"
    elif row is None:
        cut = [f"{t['name']} {t['ended']}" for t in result["tasks"] if t["ended"] not in WHOLE]
        verdict = f"{NEEDS}: {', '.join(cut) or 'no program has such a row on this device'}"
    elif row["status"] != MEASURED:
        verdict = row["status"]
    elif not isinstance(number := row.get(estimate.number), int | float):
        verdict = f"{NEEDS}: no {estimate.number} (is the device in hardware.py?)"
    else:
        value, nearest = number, min(max(number, estimate.least), estimate.most)
        verdict = "below" if value < nearest else "above" if value > nearest else "within"
        if estimate.device not in device:
            verdict += f" (another device: made for {estimate.device})"
        ratio = value / nearest if nearest else 1.0 if value == nearest else None
    most = None if estimate.most == INFINITY else estimate.most
    found = {"measured": value, "ratio": ratio, "verdict": verdict}
    return estimate._asdict() | {"most": most, "expected": estimate.interval, **found}


def compared(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every estimate of the part beside what was measured."""
    return [find(each, result) for each in estimates() if each.part == result["part"]]


def why_wrong(row: Row) -> str:
    """What makes the exit status 1; empty: nothing."""
    if row.get("right") is False:
        return "is wrong"
    return row["status"] if row.get("ours", True) and row["status"].startswith(FAILED) else ""


def in_short(row: Row, measurement: bool = True) -> str:
    """A few numbers of a row; without a measurement, only whether it is right."""
    said = [] if "right" not in row else ["right" if row["right"] else "WRONG"]
    if measurement and "milliseconds" in row:
        said.append(f"{row['milliseconds']['median']:.3f} ms")
    numbers = {key: form for key, form in NUMBERS.items() if row.get(key) is not None}
    said += [f"{key} {row[key]:{form}}" for key, form in numbers.items() if measurement]
    return ", ".join(said)


def wrong(result: Mapping[str, Any]) -> list[str]:
    """What is wrong, then what of ours failed, then programs that ended by themselves too early."""
    rows = [f"{row['name']}: {why}" for row in result["rows"] if (why := why_wrong(row))]
    rows.sort(key=lambda said: not said.endswith(": is wrong"))
    ends = [(task["name"], task["ended"]) for task in result["tasks"]]
    broken = [each for each in ends if each[1].startswith("exit status") and each[1] not in WHOLE]
    return rows + [f"{name}: {ended}" for name, ended in broken]


def table(*lines: tuple[Any, ...]) -> list[str]:
    """The first one is the head."""
    cells = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    return [cells[0], "|---" * len(lines[0]) + "|", *cells[1:], ""]


def page(result: Mapping[str, Any]) -> str:
    """The page of one part as Markdown. `result`: what run.py writes as JSON."""
    about = ", ".join(f"{key} {value}" for key, value in result["about"].items() if value)
    lines = [f"# make bench-gpu PART={result['part']}", "", about, ""]
    if not measures(result):
        lines += ["**Not measurements**: tiny sizes, without a GPU.", ""]
    lines += ["## Wrong or failed", "", *(f"- {what}" for what in wrong(result) or ["nothing"])]
    number = lambda value, form: "" if value is None else f"{value:{form}}"  # noqa: E731
    lines += ["", "## Estimates", ""]
    lines += table(
        ("estimate", "expected", "measured", "ratio", "verdict", "source"),
        *(
            (each["what"], each["expected"], number(each["measured"], ".4g"),
             number(each["ratio"], ".3f"), each["verdict"], each["source"])
            for each in result["estimates"]
        ),
    )  # fmt: skip
    tasks = [(task["name"], f"{task['seconds']:.0f}", task["ended"]) for task in result["tasks"]]
    lines += ["## Programs", "", *table(("program", "seconds", "ended"), *tasks)]
    right = {"name", "status", "right"}  # and no number: a test, of which there are many
    plain = [row for row in result["rows"] if row.keys() == right and row["right"]]
    tests = Counter(row["name"].partition("::")[0] for row in plain)
    others = [row for row in result["rows"] if row not in plain]
    rows = [(row["name"], row["status"], in_short(row, measures(result))) for row in others]
    rows += [(f"{file}: {count} tests", MEASURED, "right") for file, count in tests.items()]
    lines += ["## Rows", "", *table(("row", "status", ""), *rows)]
    for row in result["rows"]:
        if "text" in row:
            lines += [f"## {row['name']}", "", "```text", row["text"], "```", ""]
    return "\n".join(lines)
