"""On suspicion, the step is computed again: a flipped bit in one rank's product is found, a
transient fault told from a persistent one, and neither is found where the data are to blame."""

import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.kernels.attention import ON_CPU, Kernel
from model.kernels.attention_choice import PLANNED, Choice
from model.kernels.bit_hash import hash_of
from model.matmul import Matmul
from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from proofs.ranks import Ranks
from runtime.checkpoint.save import Saver
from runtime.health import examine
from runtime.health.compare import Computed, _is_rounding, compute, disputes
from runtime.health.examine import Suspect, make_copies_equal
from runtime.health.excluded import excluded_nodes
from runtime.health.faults import flip
from runtime.health.products import Compute, Inputs, linear_layers, wrap
from runtime.health.replicas import check_replicas
from runtime.log.events import append_event, read_events
from settings.load import load_config
from tests.health.faulty_runs import flip_a_bit, run_with_a_bit_flipped
from tests.planted import planted
from tests.runs import (
    LAYOUT_3D,
    losses,
    said_by,
    status_of,
    train_run,
    write_config,
)
from tests.steps import make_step, rows_of
from training.step import TrainStep

LAYOUTS = [
    {"tp": 2, "dp_shard": 2},
    *(pytest.param(other, marks=pytest.mark.thorough) for other in [
        {**LAYOUT_3D, "dp_shard": 2},
        {"dp_shard": 4, "pp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        {"cp": 2, "dp_shard": 2, "pp": 2, "schedule": "zb_h1"},
    ]),
]  # fmt: skip


def world_of(layout: dict[str, Any]) -> int:
    return math.prod(size for size in layout.values() if isinstance(size, int))


def suspicions(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run") if event["event"] == "suspicion"]


def fault(rank: int, times: str, step: int = 3) -> str:
    layer = 3 if rank >= 4 else 1
    product = "weight_gradient" if times == "1" else "input_gradient"
    about = f"layer: {layer}, product: {product}, bit: 30, times: {times}"
    return f"guard.inject_fault={{rank: {rank}, step: {step}, {about}}}"


# --- runs with a fault ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rank", [1, pytest.param(6, marks=pytest.mark.thorough)])
def test_a_persistent_fault_names_its_rank_and_ends_the_run(
    ranks: Ranks, data: Path, tmp_path: Path, layout: dict[str, Any], rank: int
) -> None:
    world = world_of(layout)
    rank = min(rank, world - 1)
    config = write_config(
        tmp_path, data, parallel=layout, checkpoint={"interval": 2}, train={"steps": 5}
    )
    for said in ranks.run(said_by, world, train_run, [config, fault(rank, "always")]):
        assert f"persistent, rank {rank} on " in said
    (event,) = suspicions(tmp_path)
    assert (event["step"], event["verdict"]) == (3, "persistent")
    assert (event["ranks"], event["is_sure"]) == ([rank], True)
    status = status_of(tmp_path)
    assert (status["state"], status["suspicion"]["ranks"]) == ("failed", [rank])
    (node,) = event["nodes"]
    assert f"rank {rank} on {node}" in excluded_nodes(tmp_path / "run")[node]["reason"]
    # nothing was saved after the fault: the next start begins before it
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step-00000002"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_transient_fault_is_told_from_it_and_changes_nothing(
    ranks: Ranks, data: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """The gradient of step 3 is wrong. The examination leaves no trace: the losses after it are
    those of a run that is not examined."""
    config = write_config(tmp_path, data, parallel=layout, train={"steps": 4})
    found = []
    for examines in ("true", "false"):
        arguments = [config, fault(1, "1"), f"guard.examine={examines}"]
        arguments.append(f"run.dir={tmp_path / examines / 'run'}")
        assert set(ranks.run(train_run, world_of(layout), arguments)) == {""}
        found.append(losses(tmp_path / examines))
    assert [event["verdict"] for event in suspicions(tmp_path / "true")] == ["transient"]
    assert suspicions(tmp_path / "false") == []
    assert excluded_nodes(tmp_path / "true" / "run") == {}
    assert found[0] == found[1]


def run_with_suspicions(arguments: list[str]) -> str:
    """Train with a loss that is not finite on the batches of steps 2, 8 and 10, whoever computes
    them: a batch is recognized by the sum of its tokens. At step 10, one rank lacks memory."""
    seen: list[int] = []

    @planted(TrainStep, "forward_backward")
    def broken(honest: Any, self: TrainStep, tokens: torch.Tensor, *more: Any, **flags: Any) -> Any:
        total = tokens.sum()
        dist.all_reduce(total)
        if total not in seen:
            seen.append(int(total))
        loss, norm = honest(self, tokens, *more, **flags)
        return (loss * math.nan if seen.index(total) + 1 in (2, 8, 10) else loss), norm

    def lacking(_: str) -> int:
        return (1 << 30) if len(seen) == 10 and dist.get_rank() == 1 else -1

    with (
        broken(),
        patch.object(examine, "_lacking_bytes", lacking),
        patch.object(examine, "PAUSE", 0),
    ):
        return train_run(arguments)


@pytest.fixture(scope="module")
def suspected(
    ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """The suspicions by step of a run that learns every second step of those before. An earlier
    start has ended in the examination of step 2."""
    folder = tmp_path_factory.mktemp("suspected")
    config = write_config(
        folder, data, parallel={"dp_shard": 2}, run={"log_interval": 2},
        train={"steps": 10, "micro_batch_size": 4},
    )  # fmt: skip
    (folder / "run").mkdir()
    append_event(folder / "run", "examining", step=2, cause="a spike")
    assert ranks.run(run_with_suspicions, 2, [config, fault(1, "1", step=5)]) == ["", ""]
    return {event["step"]: event for event in suspicions(folder)}


SUSPICIONS = {
    "a step that ended an earlier start": (2, "not examined", "did not end"),
    "a fault a step before the logged one": (6, "transient", "computed again"),
    "a bad batch": (8, "reproducible", "all ranks agree"),
    "a rank that lacks memory": (10, "not examined", "lacks 1,024 MiB"),
}


@pytest.mark.parametrize("name", SUSPICIONS)
def test_the_verdict_on(suspected: dict[int, dict[str, Any]], name: str) -> None:
    """It is not examined if that might end the run. A batch that is bad for all blames no rank."""
    step, verdict, why = SUSPICIONS[name]
    assert (suspected[step]["verdict"], suspected[step]["ranks"]) == (verdict, [])
    assert why in suspected[step]["why"]
    assert suspected.keys() == {2, 6, 8, 10}


def test_a_step_that_ended_a_start_is_never_examined_again(tmp_path: Path) -> None:
    append_event(tmp_path, "examining", step=2, cause="a spike")
    for _ in range(2):  # it may end the next start again
        assert examine._did_not_end(tmp_path, 2)
        append_event(tmp_path, "suspicion", step=2, verdict="not examined")
    assert not examine._did_not_end(tmp_path, 3)
    # control: an examination that has ended
    append_event(tmp_path, "suspicion", step=2, verdict="transient")
    assert not examine._did_not_end(tmp_path, 2)


@planted(Saver, "_write")
def slow_write(write, *about):
    time.sleep(1)  # the first save is still being written when the run ends
    write(*about)


def run_with_slow_saves(arguments: list[str]) -> str:
    with slow_write():
        return run_with_a_bit_flipped(arguments)


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        pytest.param("1", "transient", marks=pytest.mark.thorough),
        ("always", "persistent, rank 3"),
    ],
)
def test_copies_that_differ_are_examined_and_not_saved(
    ranks: Ranks, data: Path, tmp_path: Path, times: str, verdict: str
) -> None:
    config = write_config(tmp_path, data, parallel=LAYOUTS[0], checkpoint={"interval": 1})
    more = []
    if times == "always":  # a bit that neither stops the loss nor raises it
        where = "rank: 3, step: 1, layer: 1, product: forward, bit: 24"
        more = [f"guard.inject_fault={{{where}, times: always}}"]
    for said in ranks.run(said_by, 4, run_with_slow_saves, [config, *more]):
        assert re.search(rf"hold different numbers.* \({verdict}", said, re.DOTALL)
    assert len(suspicions(tmp_path)) == 1
    assert bool(excluded_nodes(tmp_path / "run")) == (times == "always")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-00000001"]
    status = status_of(tmp_path)
    assert (status["state"], "hold different numbers" in status["reason"]) == ("failed", True)


@pytest.mark.slow  # a minute and a half
def test_two_hundred_undisturbed_steps_raise_no_suspicion(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, data, parallel=LAYOUT_3D, train={"steps": 200}, checkpoint={"interval": 50}
    )
    assert ranks.run(train_run, 8, [config, "run.log_interval=5"]) == [""] * 8
    assert suspicions(tmp_path) == []
    assert not (tmp_path / "run" / "excluded.json").exists()


def test_a_compiled_model_has_no_products_to_compare() -> None:
    now = Computed(2.0, 1.0, torch.zeros(0, 2, dtype=torch.int64))
    train = SimpleNamespace(mesh=SimpleNamespace(device="cpu"))
    rows = torch.zeros(1), torch.zeros(1)
    found = examine._compare_with_step(train, Suspect(rows), now)  # type: ignore[arg-type]
    assert (found.verdict, "train.compile" in found.why) == ("not examined", True)
    found = examine._compare_with_step(train, Suspect(rows, 2.0, 1.0), now)  # type: ignore[arg-type]
    assert (found.verdict, "train.compile" in found.why) == ("reproducible", True)
    # control: products that agree
    now.products = torch.ones(1, 2, dtype=torch.int64)
    found = examine._compare_with_step(train, Suspect(rows), now)  # type: ignore[arg-type]
    assert (found.verdict, "all ranks agree" in found.why) == ("transient", True)


# --- parts of an examination ----------------------------------------------------------------------


def step_of(case: Case) -> tuple[TrainStep, list[torch.Tensor]]:
    """A step of this case, and this rank's rows of a batch."""
    step = make_step(case)
    return step, rows_of(step)


def copies_after(case: Case) -> tuple[bool, bool]:
    """Whether copies that differ are equal after make_copies_equal; and whether computing twice
    gives the same bits, and leaves no gradients."""
    train, rows = step_of(case)
    if dist.get_rank() == 1:
        flip_a_bit(train, "norm.weight")
    make_copies_equal(train)
    check_replicas(train)
    first, again = compute(train, *rows), compute(train, *rows)
    assert len(first.products) >= 9 * case.config().model.num_layers
    return torch.equal(first.products, again.products), all(
        weight.parameter.grad is None for weight in train.weights
    )


def test_copies_are_made_equal_and_products_repeat(ranks: Ranks) -> None:
    case = Case(MeshSizes(dp_replicate=2), num_microbatches=1)
    assert ranks.run(copies_after, 2, case) == [(True, True)] * 2


# what flips a bit of the first layer's products: ranks, the bit, and whether this machine repeats
# bits; and whom an examination names, and whether it is sure
FLIPS = {
    # rank 1 differs from both neighbours, too
    "a rank between two faulty ones is not at fault": ({0, 2}, 30, True, ([0, 2], True)),
    "rounding that repeats": ({1}, 0, True, ([1], True)),
    # on a GPU, a library may sum the same numbers in another order
    "rounding that may vary": ({1}, 0, False, ([0, 1, 2], False)),
}


def verdicts_on(case: Case) -> dict[str, tuple[list[int], bool]]:
    found = {}
    for name, (faulty, bit, repeats, _) in FLIPS.items():
        train, rows = step_of(case)

        def flips(_: str, kind: str, compute: Compute, inputs: Inputs, bit: int = bit) -> Tensor:
            result = compute()
            if kind == "forward":
                flip(result, bit)
            return result

        if dist.get_rank() in faulty:
            wrap(dict([next(iter(linear_layers(train).items()))]), flips)
        with patch.object(examine, "_repeats_bits", lambda _, answer=repeats: answer):
            verdict = examine.examine(train, Suspect((rows[0], rows[1])))
        assert verdict.verdict == "persistent"
        found[name] = verdict.ranks, verdict.is_sure
    return found


@pytest.fixture(scope="module")
def verdicts(ranks: Ranks) -> list[dict[str, tuple[list[int], bool]]]:
    case = Case(MeshSizes(dp_replicate=4), dtype="float32", num_microbatches=1)
    return ranks.run(verdicts_on, 4, case)


@pytest.mark.parametrize("name", FLIPS)
def test_who_is_named(verdicts: list[dict[str, tuple[list[int], bool]]], name: str) -> None:
    assert [of_rank[name] for of_rank in verdicts] == [FLIPS[name][3]] * 4


def test_only_the_same_inputs_with_another_output_are_a_dispute() -> None:
    mine = torch.tensor([[1, 10], [2, 20], [3, 30], [4, 40]])
    other = torch.tensor([[1, 10], [2, 21], [9, 31], [4, 40]])
    assert disputes(mine, other) == [1]
    assert disputes(mine, mine) == []


def kernels_as_on_a_gpu() -> dict[str, list[str]]:
    """Whichever kernel of attention is wanted: those that a Hopper GPU would have in a step, in an
    examination, and in another step."""
    arguments = ["train.dtype=bfloat16", "train.seq_len=128", "model.num_layers=1"]
    arguments += ["train.global_batch_size=1", "train.micro_batch_size=1"]
    arguments += ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1"]
    rows = torch.ones(1, 128, dtype=torch.int64), torch.ones(1, 128, dtype=torch.int64)
    found: dict[str, list[str]] = {}
    for wanted in ("cudnn", "flash3"):
        names = found[wanted] = []

        def noted(choice: Choice, names: list[str] = names) -> Kernel:
            names.append(choice.kernel.name)
            return ON_CPU

        kernel = f"model.attention_kernel={wanted}"
        step = make_step(load_config("configs/laptop.yaml", [*arguments, kernel]))
        with (
            patch("model.mask.device_of", lambda _: PLANNED._replace(flash3=True)),
            patch("model.mask.made_ready", noted),
        ):
            step(0, *rows)
            compute(step, *rows)
            step(1, *rows)
    return found


def test_an_examination_has_kernels_whose_results_repeat(ranks: Ranks) -> None:
    """Whichever kernel the run has; it is not refused, and the run has its own again."""
    (found,) = ranks.run(kernels_as_on_a_gpu, 1)
    for wanted, usual in {"cudnn": "cuDNN", "flash3": "flash 3"}.items():
        assert found[wanted] == [usual, "flash 2", usual]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["forward", "input_gradient", "weight_gradient"])
def test_rounding_is_told_from_a_flipped_exponent_bit(dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    # x [5, 3, 48] · weightᵀ [32, 48]; dy [5, 3, 32] · weight [32, 48]; dyᵀ · x [5, 3, 48]
    shapes = {
        "forward": ((5, 3, 48), (32, 48)),
        "input_gradient": ((5, 3, 32), (32, 48)),
        "weight_gradient": ((5, 3, 32), (5, 3, 48)),
    }
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes[kind]]
    given: list[torch.Tensor | None] = [each.double() for each in inputs]
    result = getattr(Matmul(), kind)(*inputs)
    assert _is_rounding(kind, result, given)
    bits = result.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)
    for place in range(0, bits.numel(), 7):
        before = hash_of([result], "auto")
        bits[place] ^= 1 << (30 if dtype == torch.float32 else 14)
        assert hash_of([result], "auto") != before
        assert not _is_rounding(kind, result, given)
        bits[place] ^= 1 << (30 if dtype == torch.float32 else 14)
    # what a diverging run computes: neither says that the rank computes wrongly
    for value in (math.inf, math.nan, torch.finfo(dtype).max):
        spoilt = [inputs[0].clone(), inputs[1]]
        spoilt[0].view(-1)[0] = value
        result = getattr(Matmul(), kind)(*spoilt)
        assert _is_rounding(kind, result, [each.double() for each in spoilt])


def test_no_fault_is_injected_unless_asked_for() -> None:
    """(What cannot be injected is refused: test_refusals.py.) The configurations of older runs say
    "" for none."""
    for overrides in ([], ["guard.inject_fault=''"]):
        assert load_config("configs/laptop.yaml", overrides).guard.inject_fault is None
