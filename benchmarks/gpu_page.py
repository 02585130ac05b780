"""The page at the end of each part of `make bench-gpu`: for every estimate, what was measured, or
why not; then every row, and what was wrong."""

from typing import Any, NamedTuple

from benchmarks.gpu_estimates import ESTIMATES, INFINITY, Estimate
from benchmarks.gpu_status import MEASURED, why_wrong

WITHIN, BELOW, ABOVE, OTHER_DEVICE = "within", "below", "above", "another device"


class Finding(NamedTuple):
    """An estimate beside what was measured; `verdict` says why if nothing was."""

    estimate: Estimate
    measured: float | None
    ratio: float | None  # to the nearest bound of the estimate; 1 inside
    verdict: str


def find(estimate: Estimate, result: dict[str, Any], rows: list[dict[str, Any]]) -> Finding:
    """Looks up the estimate's number in the rows of its part. `result`: as for `page`."""
    if not estimate.row:
        return Finding(estimate, None, None, f"not measured: {estimate.why_not}")
    if not result["measurement"]:
        return Finding(estimate, None, None, "not measured: needs a GPU and full sizes")
    row = next((row for row in rows if row["name"] == estimate.row), None)
    if row is None:
        return Finding(estimate, None, None, f"not measured: {unfinished(result)}")
    if row["status"] != MEASURED:
        return Finding(estimate, None, None, row["status"])
    value: Any = row
    for key in estimate.number.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, int | float):
        why = f"the row has no {estimate.number} (is the device in hardware.py?)"
        return Finding(estimate, None, None, f"not measured: {why}")
    nearest = min(max(value, estimate.least), estimate.most)
    ratio = value / nearest if nearest else INFINITY
    verdict = BELOW if value < estimate.least else ABOVE if value > estimate.most else WITHIN
    if estimate.device not in result["about"]["device"]:
        verdict = f"{verdict} ({OTHER_DEVICE}: made for {estimate.device})"
    return Finding(estimate, value, ratio, verdict)


def unfinished(result: dict[str, Any]) -> str:
    """Why a row is missing: the programs that did not run to their ends."""
    others = [t for t in result["tasks"] if t["ended"] not in ("exit status 0", "exit status 1")]
    said = ", ".join(f"{task['name']} {task['ended']}" for task in others)
    return said or "no program has such a row on this device"


def findings(result: dict[str, Any], rows: list[dict[str, Any]]) -> list[Finding]:
    """Every estimate of the part."""
    return [find(each, result, rows) for each in ESTIMATES if each.part == result["part"]]


def as_json(finding: Finding) -> dict[str, Any]:
    estimate = finding.estimate
    most = None if estimate.most == INFINITY else estimate.most
    return {
        "estimate": estimate.what,
        "least": estimate.least,
        "most": most,
        "source": estimate.source,
        "row": estimate.row,
        "measured": finding.measured,
        "ratio": finding.ratio,
        "verdict": finding.verdict,
    }


def interval(estimate: Estimate) -> str:
    least, most = (f"{bound:.4g}" for bound in (estimate.least, estimate.most))
    if estimate.most == INFINITY:
        return f"≥ {least}"
    if estimate.least == 0:
        return f"≤ {most}"
    return least if least == most else f"{least} to {most}"


def wrong_rows(rows: list[dict[str, Any]]) -> list[str]:
    """The names of rows that are wrong, then of ours that failed, with what they say."""
    found = [f"{row['name']}: {why}" for row in rows if (why := why_wrong(row))]
    return sorted(found, key=lambda said: not said.endswith(": is wrong"))


def page(result: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The page of one part as Markdown.

    result: what gpu_hour.py writes as JSON.
    """
    about = ", ".join(f"{key} {value}" for key, value in result["about"].items() if value)
    lines = [f"# make bench-gpu PART={result['part']}", "", about, ""]
    if not result["measurement"]:
        lines += ["**Not measurements**: tiny sizes, without a GPU.", ""]
    wrong = wrong_rows(rows)
    lines += ["## Wrong or failed", "", *(f"- {what}" for what in wrong or ["nothing"]), ""]
    if result["absent"]:
        absent = [f"- {package}: {what}" for package, what in result["absent"].items()]
        lines += ["## Packages that are not installed", "", *absent, ""]
    lines += ["## Estimates", "", "| estimate | expected | measured | ratio | verdict | source |"]
    lines += ["|---|---|---|---|---|---|"]
    for found in findings(result, rows):
        value = "" if found.measured is None else f"{found.measured:.4g}"
        ratio = "" if found.ratio is None else f"{found.ratio:.3f}"
        cells = (found.estimate.what, interval(found.estimate), value, ratio, found.verdict,
                 found.estimate.source)  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Programs", "", "| program | seconds | ended |", "|---|---|---|"]
    lines += [
        f"| {task['name']} | {task['seconds']:.0f} | {task['ended']} |" for task in result["tasks"]
    ]
    lines += ["", "## Rows", "", "| row | status | |", "|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['status']} | {in_short(row, result['measurement'])} |"
        for row in rows
    ]
    for row in rows:
        if "text" in row:
            lines += ["", f"## {row['name']}", "", "```text", row["text"], "```"]
    return "\n".join(lines) + "\n"


def in_short(row: dict[str, Any], measurement: bool) -> str:
    """A few numbers of a row; without a measurement, only whether it is right."""
    said = []
    if "right" in row:
        said.append("right" if row["right"] else "WRONG")
    if not measurement:
        return ", ".join(said)
    times = row.get("milliseconds")
    if isinstance(times, dict) and times.get("median") is not None:
        said.append(f"{times['median']:.3f} ms")
    for key, form in (("fraction_of_copy", ".0%"), ("mfu", ".1%"), ("fraction_of_peak", ".1%"),
                      ("points", ".2f"), ("hidden", ".0%"), ("over_planned", ".3f"),
                      ("over_rehearsed", ".3f"), ("idle_share", ".1%")):  # fmt: skip
        if isinstance(row.get(key), int | float):
            said.append(f"{key} {row[key]:{form}}")
    return ", ".join(said)
