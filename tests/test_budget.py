"""The operators of a block and of a step: the host waits only for the counts of experts, no large
result is for nothing, and launches are near the least. benchmarks/budget.py shows every operator,
and what a change adds, with the line that causes it."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.budget import describe, differences, identity, main, sums, write_results
from benchmarks.budget_bounds import least_flops, least_launches
from benchmarks.budget_cases import CASES, Case, block, budget, step
from benchmarks.budget_kinds import ATTENTION, COLLECTIVE, LAUNCHES, PRODUCT, TRITON
from benchmarks.budget_ledger import recording
from model.kernels.swiglu import swiglu
from parallel.axes import MeshSizes
from tools.rehearse.fake_gpu import DEVICE, fake_gpu, one_rank
from tools.rehearse.rank import alone
from training.gradient import gradient_norm

QUICK = [block("8B", "full"), block("70B", "selective"), step("8B", 2, 8)]
SLOWER = [pytest.param(c, marks=pytest.mark.thorough) for c in CASES if c not in QUICK]


def each(cases: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


EACH = each([*QUICK, *SLOWER])
EACH_BLOCK = each([*QUICK[:2], *(slow for slow in SLOWER if slow.values[0].is_block)])
SMALL = ("model.dim=64", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=96",
         "model.vocab_size=128", "train.seq_len=32")  # fmt: skip


@functools.cache
def rows_of(case: Case) -> list[dict[str, Any]]:
    return budget(case)["rows"]


@EACH
def test_the_host_waits_only_for_the_counts_of_experts(case: Case) -> None:
    waits = [(row["where"], row["waits"]) for row in rows_of(case) if row.get("waits")]
    assert waits == [("parallel/expert.py counts_on_host", 1)] * case.config().model.has_experts


@EACH
def test_no_product_or_collective_is_for_nothing(case: Case) -> None:
    kinds = (PRODUCT, ATTENTION, TRITON, COLLECTIVE)
    assert not [row for row in rows_of(case) if row.get("for_nothing") and row["kind"] in kinds]


@EACH
def test_nothing_needs_less_than_the_least(case: Case) -> None:
    launches = sums(rows_of(case), "launches")
    below = {key: least for key, least in least_launches(case).items() if launches[key] < least[0]}
    assert not below


@EACH_BLOCK
def test_launches_of_a_block_are_near_the_least(case: Case) -> None:
    most = 2.5 if case.config().model.has_experts else 1.75
    least = sum(bound.launches for bound in least_launches(case).values())
    assert sum(row.get("launches", 0) for row in rows_of(case)) <= most * least


@EACH_BLOCK
def test_products_that_nothing_reads_are_all_that_is_above_the_least(case: Case) -> None:
    """Two ways to the same figure: from the shapes of the weights, and from what nothing reads."""
    rows = rows_of(case)
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
    rows = rows_of(QUICK[0])
    (found,) = differences("it", {"rows": rows}, {"rows": rows[1:]})
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
    case = block("8B", "none")
    found = budget(case)
    assert len({identity(row) for row in found["rows"]}) == len(found["rows"])
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
