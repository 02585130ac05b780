"""The budget of a block and of a step: which operators a rank runs, what they move, and what is the
least. `python -m benchmarks.budget`

Runs the training code of one rank on the fake GPU of the rehearsal, where tensors have no data, and
records every operator (budget_ledger.py) of a Llama 3 8B or 70B block in each mode of activation
checkpointing, and of a step with each ZeRO stage (budget_cases.py). Prints the tables and writes
benchmarks/results/budget.json.

    python -m benchmarks.budget                 all tables; writes the results
    python -m benchmarks.budget --case block    only cases with this in their names; no results
    python -m benchmarks.budget --check         only what differs from the results; writes nothing

docs/budget.md explains the tables. Nothing is timed: the milliseconds are bytes divided by the
memory bandwidth in an H100's data sheet.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.budget_bounds import Least, least_flops, least_launches
from benchmarks.budget_cases import CASES, Case, budget
from benchmarks.budget_kinds import (
    ATTENTION,
    COLLECTIVE,
    COPY,
    FILL,
    KINDS,
    OF_ONE_RANK,
    POINTWISE,
    PRODUCT,
)  # fmt: skip
from benchmarks.budget_places import PASSES
from hardware import H100
from tools.command import CommandParser, run_command

RESULTS = Path(__file__).parent / "results" / "budget.json"
FIGURES = ("launches", "bytes", "flops", "waits", "for_nothing", "unread")
IDENTITY = ("pass", "kind", "name", "where")


# --- comparing with the results ---


def version() -> str:
    """The version of torch on which FSDP's part of the budget depends."""
    return ".".join(torch.__version__.split(".")[:2])


def differences(
    case: str, then: dict[str, Any], now: dict[str, Any], fsdp: bool = True
) -> list[str]:
    """One line for each row that differs. `fsdp`: whether FSDP's own operators are compared, which
    differ between versions of torch."""
    before, after = ({identity(row): row for row in each["rows"]} for each in (then, now))
    found = []
    for key in sorted(before.keys() | after.keys()):
        if not fsdp and key[0] == "FSDP":
            continue
        old, new = before.get(key, {}), after.get(key, {})
        changed = [
            f"{name.replace('_', ' ')} {old.get(name, 0):,.0f} → {new.get(name, 0):,.0f}"
            for name in FIGURES
            if old.get(name, 0) != new.get(name, 0)
        ]
        if changed:
            part, kind, name, where = key
            line = f", now line {new['line']}" if new else ", no longer there"
            found.append(f"{case}: {part}: {kind} {name} at {where}{line}: {', '.join(changed)}")
    return found


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes a row the same row: everything but the line's number, and its figures."""
    return tuple(row[name] for name in IDENTITY)


def read_results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def write_results(found: dict[str, dict[str, Any]]) -> None:
    """Write one line for each row, so that a difference between two versions can be read."""
    without_lines = {
        name: {part: [_without_line(row) for row in rows] for part, rows in each.items()}
        for name, each in found.items()
    }
    lines = ["{", f' "torch": {json.dumps(version())},', ' "cases": {']
    for i, (name, each) in enumerate(without_lines.items()):
        lines.append(f"  {json.dumps(name)}: {{")
        for j, (part, rows) in enumerate(each.items()):
            lines.append(f"   {json.dumps(part)}: [")
            lines += ["    " + json.dumps(row) + "," for row in rows[:-1]]
            lines += ["    " + json.dumps(row) for row in rows[-1:]]
            lines.append("   ]" + "," * (j < len(each) - 1))
        lines.append("  }" + "," * (i < len(found) - 1))
    RESULTS.write_text("\n".join([*lines, " }", "}", ""]), encoding="utf-8")


def _without_line(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "line"}


# --- printing ---


def milliseconds(size: float) -> float:
    """At least as long does it take an H100 to read and write so many bytes."""
    return 1e3 * size / H100.memory_bytes_per_second


def sums(rows: list[dict[str, Any]], figure: str) -> dict[tuple[str, str], float]:
    """(pass, kind) → the sum of one figure."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        found[row["pass"], row["kind"]] += row.get(figure, 0)
    return found


def describe(case: Case, found: dict[str, Any]) -> str:
    """The tables of a case."""
    rows, least = found["rows"], least_launches(case)
    launches, sizes = sums(rows, "launches"), sums(rows, "bytes")
    lines = ["", f"=== {case.name} ===", ""]
    lines.append(f"{'pass':14} {'kind':11} {'launches':>8} {'least':>6} {'MB':>10}  why the least")
    for part in PASSES:
        for kind in KINDS:
            count, size = launches[part, kind], sizes[part, kind]
            bound = least.get((part, kind), Least(0, ""))
            if kind == OF_ONE_RANK or not (count or bound.launches):
                continue
            shown = "" if kind == COLLECTIVE else f"{size / 1e6:10,.1f}"
            lines.append(
                f"{part:14} {kind:11} {count:8.0f} {bound.launches:6} {shown:>10}  {bound.reason}"
            )
    total = sum(launches.values())
    lines.append(f"{'together':26} {total:8.0f} {sum(b.launches for b in least.values()):6}")
    lines += ["", *_products(case, rows)]
    lines += ["", "copies, fills and pointwise operators of 1 MB or more, and what causes them"]
    bound = (COPY, FILL, POINTWISE)
    moved = [r for r in rows if r["kind"] in bound and r.get("bytes", 0) >= 1e6]
    for row in sorted(moved, key=lambda row: -row["bytes"]):
        lines.append(_row(row))
    lines += ["", "results that nothing reads"]
    wasted = [row for row in rows if row.get("for_nothing") or row.get("unread", 0) >= 1e7]
    lines += [_unread(row) for row in wasted] or ["  none"]
    lines += ["", "operators for which the host waits"]
    lines += [_row(row) for row in rows if row.get("waits")] or ["  none"]
    lines += ["", "largest tensors that are freed in the forward or backward that allocated them"]
    for row in found["temporaries"]:
        lines.append(f"  {row['bytes'] / 1e6:10,.1f} MB  {row['pass']}: {_place(row)}")
    return "\n".join(lines)


def _products(case: Case, rows: list[dict[str, Any]]) -> list[str]:
    now, wasted = sums(rows, "flops"), sums(rows, "flops_for_nothing")
    least = least_flops(case)._asdict() if case.is_block else {}
    lines = ["TFLOP of products       now   least   of which nothing reads the result"]
    for part in ("forward", "recomputation", "backward"):
        bound = f"{least[part] / 1e12:7.3f}" if least else f"{'':7}"
        lines.append(
            f"  {part:17} {now[part, PRODUCT] / 1e12:7.3f} {bound}"
            f"   {wasted[part, PRODUCT] / 1e12:.3f}"
        )
    attention = sum(now[part, ATTENTION] for part in ("forward", "recomputation", "backward"))
    return [*lines, f"  (attention        {attention / 1e12:7.3f})"]


def _row(row: dict[str, Any]) -> str:
    size, many = row.get("bytes", 0), row.get("launches", 0)
    return (
        f"  {size / 1e6:9,.1f} MB {milliseconds(size):6.3f} ms  {many:3} × {row['name']:21} "
        f"{row['pass']}: {_place(row)}"
    )


def _unread(row: dict[str, Any]) -> str:
    number, many = row.get("for_nothing", 0), row.get("launches", 0)
    return (
        f"  {row['unread'] / 1e6:9,.1f} MB  {number} of {many} × {row['name']:21} "
        f"{row['pass']}: {_place(row)}"
    )


def _place(row: dict[str, Any]) -> str:
    file, _, function = row["where"].rpartition(".py ")
    return f"{file}.py:{row['line']} {function}" if file else row["where"]


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--case", metavar="TEXT", help="only cases with TEXT in their names")
    parser.add_argument("--check", action="store_true", help="compare with the results")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if (options.case or "") in case.name]
    found = {case.name: budget(case) for case in cases}
    if options.check:
        results = read_results()
        same_torch = results["torch"] == version()
        lines = [
            line
            for name, now in found.items()
            for line in differences(name, results["cases"][name], now, fsdp=same_torch)
        ]
        print("\n".join(lines) or f"{len(found)} cases are as in {RESULTS.name}")
        return int(bool(lines))
    print("Passes:", *(f"  {name:14} {meaning}" for name, meaning in PASSES.items()), sep="\n")
    print("Kinds:", *(f"  {name:22} {meaning}" for name, meaning in KINDS.items()), sep="\n")
    for case in cases:
        print(describe(case, found[case.name]), flush=True)
    if options.case is None:
        write_results(found)
    return 0


if __name__ == "__main__":
    run_command(main)
