"""float16: the scale of the loss is the same on every rank of every layout, also where only one
overflows; it changes no number, and a run that resumes continues with it."""

import math
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import training.guard
import training.step
from errors import UserError
from proofs.ranks import Ranks
from runtime.device import check_gpu
from runtime.health.examine import Examination
from tests import runs
from tests.health.faulty_runs import run_with_bad_steps
from tests.planted import from_table
from tests.proofs.parity_tiers import thorough_but
from training.balance import Balance
from training.guard import FIRST_SCALE, UpdateGuard

# It grows after two finite norms, and in step 3 a gradient of one rank overflows.
HISTORY = [FIRST_SCALE * factor for factor in (1, 1, 2, 1, 1, 2)]
LAYOUT_8 = {"parallel": runs.LAYOUT_3D | {"dp_shard": 2}}
EXPERTS = runs.EXPERTS | {"experts": runs.EXPERTS["experts"] | {"router_aux_weight": 1.0}}
OVERFLOWS: dict[str, tuple[dict[str, Any], int, int]] = {  # sections, world, the rank
    "tp": (LAYOUT_8, 8, 1),
    "pp and dp": (LAYOUT_8, 8, 6),
    "cp": ({"parallel": {"cp": 2}}, 2, 1),
    "ep": ({"model": EXPERTS, "parallel": {"dp_shard": 2, "ep": 2}}, 2, 1),
    "alone": ({}, 1, 0),
}


def run_with_overflow(arguments: list[str], rank: int, bad: set[int], *mistakes: str) -> str:
    with from_table(__name__, *mistakes), patch.object(training.guard, "GROWS_AFTER", 2):
        return run_with_bad_steps(arguments, rank, bad)


def train(
    ranks: Ranks, data: Path, folder: Path, case: str, *mistakes: str, saves: bool = False
) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of six steps in float16. If it `saves`, the last two come again,
    resumed."""
    sections, world, rank = OVERFLOWS[case]
    interval = {"interval": 4, "keep_last": 9} if saves else {"interval": "never"}
    sections = {"train": {"dtype": "float16"}, "checkpoint": interval} | sections
    config = runs.write_config(folder, data, **sections)
    assert ranks.run(run_with_overflow, world, [config], rank, {3}, *mistakes) == [""] * world
    if saves:
        before = runs.losses(folder)
        runs.forget_last(folder)
        assert ranks.run(run_with_overflow, world, [config], rank, set(), *mistakes) == [""] * world
        assert runs.losses(folder) == before
    return runs.metrics_of(folder)


@pytest.fixture(scope="module")
def plain(
    ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, list[dict[str, Any]]]:
    """The same in float32, on one rank; with experts and without."""
    found = {}
    for experts in (False, True):
        folder = tmp_path_factory.mktemp("plain")
        config = runs.write_config(folder, data, model=EXPERTS if experts else {})
        assert ranks.run(run_with_overflow, 1, [config], 0, {3}) == [""]
        found[experts] = runs.metrics_of(folder)
    assert "loss_scale" not in found[False][0]
    return found


def wrong(lines: list[dict[str, Any]], plain: list[dict[str, Any]]) -> set[str]:
    """The keys of `lines`, in float16, that are not as in float32."""
    found = set()
    for line, exact, scale in zip(lines, plain, HISTORY, strict=True):
        same = {
            "loss_scale": line["loss_scale"] == scale,
            "skipped_updates": line["skipped_updates"] == exact["skipped_updates"],
            "loss": math.isclose(line["loss"], exact["loss"], rel_tol=2e-3),
            "grad_norm": line["grad_norm"] == pytest.approx(exact["grad_norm"], 2e-2, nan_ok=True),
        }
        found |= {key for key, is_same in same.items() if not is_same}
    return found


QUICK = ["tp", "ep", "alone"]


@pytest.mark.parametrize("case", thorough_but(QUICK, OVERFLOWS))
def test_every_rank_scales_alike(
    ranks: Ranks, data: Path, tmp_path: Path, plain: dict[bool, Any], case: str
) -> None:
    lines = train(ranks, data, tmp_path, case, saves=True)
    assert wrong(lines, plain[case == "ep"]) == set()
    assert runs.trainer_of(tmp_path, 4)["bad_in_a_row"] == 0, "an overflow is no bad step"


def own_norm(call: Any, self: UpdateGuard, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """A rank that has no overflow itself goes on."""
    own = norm if dist.get_rank() == 1 else norm.nan_to_num(1.0, 1.0)
    result: torch.Tensor = call(self, loss, own)
    return result


def counts_in_the_moments(
    call: Any, self: UpdateGuard, loss: torch.Tensor, norm: torch.Tensor
) -> torch.Tensor:
    call(self, loss, norm)
    return norm.nan_to_num(1.0, 1.0)


EACH = "a scale of each rank"
MISTAKES: dict[str, tuple[Any, ...]] = {  # and where it is found, by which keys
    EACH: (UpdateGuard, "__call__", own_norm),
    # the norm, and the clipping by it, see gradients that are still scaled
    "unscaled after the clip":
        (training.step, "unscale", lambda *_: None, "alone", {"grad_norm"}),
    "in the moments": (UpdateGuard, "__call__", counts_in_the_moments, "alone", {"loss"}),
    "not saved": (UpdateGuard, "scale_state", lambda *_: None, "alone", {"loss_scale"}),
    "the balance is not scaled":
        (Balance, "begin", lambda begin, self, scale: begin(self, torch.ones_like(scale)),
         "ep", {"grad_norm"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", [each for each in MISTAKES if each != EACH])
def test_a_mistake_is_found(
    ranks: Ranks, data: Path, tmp_path: Path, plain: dict[bool, Any], mistake: str
) -> None:
    *_, case, keys = MISTAKES[mistake]
    lines = train(ranks, data, tmp_path, case, mistake, saves=mistake == "not saved")
    assert wrong(lines, plain[case == "ep"]) >= keys


def test_a_scale_of_each_rank_is_found(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    sections = {"train": {"dtype": "float16"}, "checkpoint": {"interval": "never"}}
    config = runs.write_config(tmp_path, data, parallel={"tp": 2}, **sections)
    mistake = [config], 1, {3}, EACH
    for said in ranks.run(runs.said_by, 2, run_with_overflow, *mistake):
        assert "copies over tp, hold different numbers" in said


def test_an_overflow_is_not_examined() -> None:
    examination = object.__new__(Examination)
    examination.norms = deque([1.0] * 4)
    assert not examination._leaps(math.inf)
    assert examination._leaps(1e4)


def test_a_gpu_that_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
    check_gpu("float16", "cuda")
    with pytest.raises(UserError, match="X does not compute in it"):
        check_gpu("bfloat16", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    check_gpu("bfloat16", "cuda")


def test_the_smallest_scale_excuses_nothing() -> None:
    guard, one = UpdateGuard(6.0, "cpu", scales_loss=True), torch.tensor(1.0)
    guard.restore([], 0, (2.0, 1))
    for scale, bad in ((1.0, 0), (1.0, 1), (1.0, 2)):
        assert guard(one, one * math.nan) == math.inf
        assert (guard.loss_scale, guard.bad_in_a_row) == (scale, bad)
    assert guard(one * math.nan, one) == math.inf, "a loss that is not finite is bad at any scale"
    assert guard.bad_in_a_row == 3
    guard.restore([], 0)
    assert guard.loss_scale == FIRST_SCALE
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        guard(one * loss, one * norm)
    assert guard.bad_in_a_row == 3, "a rollback leaves out the batches of all three"
