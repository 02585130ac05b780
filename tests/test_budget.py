"""Every operator of a block and of a step is in benchmarks/results/budget.json: an added launch,
copy, product or wait of the host fails here, with the line that causes it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.budget import (
    REWRITE,
    describe,
    differences,
    identity,
    main,
    read_results,
    sums,
    version,
    write_results,
)
from benchmarks.budget_bounds import least_flops, least_launches
from benchmarks.budget_cases import CASES, Case, block, budget, step
from benchmarks.budget_kinds import LAUNCHES, PRODUCT
from benchmarks.budget_ledger import recording
from model.kernels.swiglu import swiglu
from parallel.axes import MeshSizes
from tools.rehearse.fake_gpu import DEVICE, fake_gpu, one_rank
from tools.rehearse.rank import alone
from training.gradient import gradient_norm

RESULTS = read_results()
BLOCKS = [case for case in CASES if case.is_block]
QUICK = [block("8B", "full"), block("70B", "selective"), step("8B", 2, 8)]
OTHERS = [pytest.param(c, marks=pytest.mark.thorough) for c in CASES if c not in QUICK]
SMALL = ("model.dim=64", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=96",
         "model.vocab_size=128", "train.seq_len=32")  # fmt: skip


@pytest.mark.parametrize("case", [*QUICK, *OTHERS], ids=lambda case: case.name)
def test_the_operators_are_those_of_the_results(case: Case) -> None:
    then, now = RESULTS["cases"][case.name], budget(case)
    found = differences(case.name, then, now, fsdp=RESULTS["torch"] == version())
    assert not found, "\n".join(
        [
            "these operators are new, gone or changed:",
            *found,
            f"if this is intended, write the table anew: {REWRITE}",
        ]
    )


def test_the_results_have_every_case_and_no_wait_of_the_host() -> None:
    """Except the one of each forward of a layer of experts."""
    assert list(RESULTS["cases"]) == [case.name for case in CASES]
    for name, found in RESULTS["cases"].items():
        assert len({identity(row) for row in found["rows"]}) == len(found["rows"])
        waits = [(row["pass"], row["where"], row["waits"]) for row in found["rows"]
                 if row.get("waits")]  # fmt: skip
        once = [("forward", "parallel/expert.py counts_on_host", 1)]
        assert waits == (once if name.startswith("8x7B") else []), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_needs_less_than_the_least(case: Case) -> None:
    rows = RESULTS["cases"][case.name]["rows"]
    launches = sums(rows, "launches")
    below = {key: least for key, least in least_launches(case).items() if launches[key] < least[0]}
    assert not below


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_products_that_nothing_reads_are_all_that_is_above_the_least(case: Case) -> None:
    """Two ways to the same figure: from the shapes of the weights, and from what nothing reads."""
    rows = RESULTS["cases"][case.name]["rows"]
    flops, wasted = sums(rows, "flops"), sums(rows, "flops_for_nothing")
    for part, least in least_flops(case)._asdict().items():
        assert flops[part, PRODUCT] - wasted[part, PRODUCT] == pytest.approx(least)


# --- controls: what is planted is found ---


def found_by_planting(case: Case, target: str, replacement: Callable[..., Any]) -> list[str]:
    """What differs if `target` is replaced, at small widths."""
    case = replace(case, keys=(*case.keys, *SMALL))
    then = budget(case)
    with patch(target, replacement):
        return differences("it", then, budget(case))


def with_clone(gate: Tensor, up: Tensor, kernels: str) -> Tensor:
    return swiglu(gate.clone(), up, kernels)


def with_product(gate: Tensor, up: Tensor, kernels: str) -> Tensor:
    gate[0].detach() @ up[0].detach().t()
    return swiglu(gate, up, kernels)


def with_item(*args: Any) -> Tensor:
    norm = gradient_norm(*args)
    return norm * 2 if norm.item() > 1 else norm


def test_an_extra_clone_is_found_with_its_bytes_and_its_line() -> None:
    target = "model.feed_forward.swiglu.swiglu"
    (found,) = found_by_planting(block("8B", "none"), target, with_clone)
    # [S, 1, F] in bfloat16, read and written
    assert f"launches 0 → 1, bytes 0 → {2 * 2 * 32 * 96:,}" in found
    assert "forward: copy clone at tests/test_budget.py with_clone" in found
    assert "now line " in found


def test_a_wait_for_the_device_is_found() -> None:
    (found,) = found_by_planting(step("8B", 2, 8), "training.step.gradient_norm", with_item)
    assert "_local_scalar_dense at tests/test_budget.py with_item" in found
    assert "waits 0 → 1" in found


def test_a_product_that_is_recomputed_for_nothing_is_found() -> None:
    target = "model.feed_forward.swiglu.swiglu"
    forward, again = sorted(found_by_planting(block("8B", "full"), target, with_product))
    assert "it: forward: product mm at tests/test_budget.py with_product" in forward
    assert "it: recomputation: product mm at tests/test_budget.py with_product" in again
    assert f"flops 0 → {2 * 96}, for nothing 0 → 1" in again


def test_what_is_gone_is_found_too() -> None:
    then = RESULTS["cases"][BLOCKS[0].name]
    now = {**then, "rows": [{**row, "line": 1} for row in then["rows"][1:]]}
    (found,) = differences("it", then, now)
    assert "no longer there" in found
    assert "→ 0" in found


def operations_of(call: Callable[[], Any]) -> list[tuple[str, int, bool]]:
    """(name, launches, waits) of each operation of `call`, in a process of its own."""
    with one_rank(MeshSizes(), 0, DEVICE) as mesh, fake_gpu(), recording(mesh) as ledger:
        call()
    return [(each.name, each.launches, each.waits) for each in ledger.operations]


def waiting() -> None:
    x = torch.zeros(4, device=DEVICE)
    x.tolist()
    x.nonzero()
    x[x > 0]
    bool(x[0])
    torch.equal(x, x)
    torch.tensor([1.0], device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.Event.synchronize(None)  # without a GPU there can be no event
    x.cpu()
    torch.ones(4).to(DEVICE)
    x[torch.tensor([0])]
    x.copy_(torch.ones(4))


def not_waiting() -> None:
    x = torch.ones(4).to(DEVICE, non_blocking=True)
    torch.where(x > 0, x, 0.0)
    x.masked_fill(x > 0, 1.0)
    x.copy_(torch.ones(4), non_blocking=True)
    torch.ones(4).tolist()
    torch.tensor([1.0]).item()


def test_everything_that_waits_is_found() -> None:
    waits = [name for name, _, waits in alone(operations_of, waiting) if waits]
    assert waits == [
        "tolist", "nonzero", "index", "_local_scalar_dense", "equal", "tensor on the device",
        "torch.cuda.synchronize", "Event.synchronize", "_to_copy", "_to_copy",
        "index", "copy_",
    ]  # fmt: skip
    assert not [name for name, _, waits in alone(operations_of, not_waiting) if waits]


def test_an_operator_of_two_launches_counts_as_two() -> None:
    """PyTorch's profiler, on the CPU, shows what the operator calls."""
    x = torch.ones(4)
    with torch.profiler.profile() as profile:
        x.masked_fill(x > 0, 1.0)
    (event,) = [e for e in profile.events() if e.name == "aten::masked_fill"]
    children = {child.name for child in event.cpu_children}
    assert {"aten::clone", "aten::masked_fill_"} <= children
    assert ("masked_fill", LAUNCHES["masked_fill"], False) in alone(operations_of, not_waiting)


# --- the command ---


def test_the_command_prints_and_checks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    case = BLOCKS[0]
    found = budget(case)
    text = describe(case, found)
    assert "forward        product            7      7" in text
    assert "model/transformer.py:" in text
    file = tmp_path / "budget.json"
    monkeypatch.setattr("benchmarks.budget.RESULTS", file)
    monkeypatch.setattr("benchmarks.budget.CASES", [case])
    write_results({case.name: found})
    assert main(["--check"]) == 0
    assert "1 cases are as in budget.json" in capsys.readouterr().out
    del found["rows"][0]
    write_results({case.name: found})
    assert "line" not in json.loads(file.read_text())["cases"][case.name]["rows"][0]
    assert main(["--check"]) == 1
    assert "launches 0 → " in capsys.readouterr().out
