"""On suspicion, the step is computed again: a flipped bit in one rank's product is found, a
transient fault told from a persistent one, and neither is found where the data are to blame."""

import math
import re
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

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
from runtime.checkpoint.save import Saver
from runtime.health import examine
from runtime.health.compare import Computed, _is_rounding, compute, disputes
from runtime.health.examine import Examination, Suspect, Verdict
from runtime.health.excluded import excluded_nodes
from runtime.health.products import Compute, Inputs, linear_layers, wrap
from runtime.health.replicas import check_replicas
from runtime.log.events import append_event
from settings.load import load_config
from tests.health.faulty_runs import Fault, faulty_run, flip, flip_a_bit, run_with_a_bit_flipped
from tests.planted import planted
from tests.runs import events_of, losses, names, said_by, status_of, write_config
from tests.steps import make_step, rows_of
from training.guard import GROWS_AFTER, WINDOW
from training.step import TrainStep

OTHERS = [
    pytest.param(8, other, marks=pytest.mark.thorough)
    for other in (
        {"pp": 2, "dp_replicate": 2, "tp": 2},
        {"cp": 2, "dp_shard": 2, "pp": 2, "schedule": "zb_h1"},
    )
]


def suspicions(folder: Path) -> list[dict[str, Any]]:
    return events_of(folder / "run", "suspicion")


@pytest.mark.parametrize(("world", "layout"), [(4, {"tp": 2, "dp_shard": 2}), *OTHERS], ids=str)
def test_a_persistent_fault_names_its_rank_and_ends_the_run(ranks, data, tmp_path, world, layout):
    rank, layer = (1, 1) if world == 4 else (6, 3)
    fault = Fault(rank, 3, always=True, layer=layer)
    config = write_config(
        tmp_path, data, parallel=layout, checkpoint={"interval": 2}, train={"steps": 5}
    )
    for said in ranks.run(said_by, world, faulty_run, [config], fault):
        assert f"persistent, rank {rank} on " in said
    (event,) = suspicions(tmp_path)
    assert (event["step"], event["verdict"]) == (3, "persistent")
    assert (event["ranks"], event["is_sure"]) == ([rank], True)
    status = status_of(tmp_path)
    assert (status["state"], status["suspicion"]["ranks"]) == ("failed", [rank])
    assert status["suspicion"]["num_ranks"] == 1
    (node,) = event["nodes"]
    assert f"rank {rank} on {node}" in excluded_nodes(tmp_path / "run")[node]["reason"]
    # nothing was saved after the fault: the next start begins before it
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step-00000002"


@pytest.mark.parametrize(("world", "layout"), [(2, {"dp_shard": 2}), *OTHERS], ids=str)
def test_a_transient_fault_is_told_from_it_and_changes_nothing(
    ranks, data, tmp_path, world, layout
):
    """The gradient of step 3 is wrong. The examination leaves no trace: the losses after it are
    those of a run that is not examined."""
    config = write_config(tmp_path, data, parallel=layout, train={"steps": 4})
    found = []
    for examines in ("true", "false"):
        arguments = [config, f"guard.examine={examines}", f"run.dir={tmp_path / examines / 'run'}"]
        fault = Fault(1, 3, always=False, product="weight_gradient")
        assert set(ranks.run(faulty_run, world, arguments, fault)) == {""}
        found.append(losses(tmp_path / examines))
    assert [event["verdict"] for event in suspicions(tmp_path / "true")] == ["transient"]
    assert suspicions(tmp_path / "false") == []
    assert excluded_nodes(tmp_path / "true" / "run") == {}
    assert found[0] == found[1]


def run_with_suspicions(arguments: list[str]) -> str:
    """Train with a fault in step 5, and a loss that is not finite on the batches of steps 2, 8 and
    10, whoever computes them: a batch is recognized by the sum of its tokens. At step 10, one rank
    lacks memory."""
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
        return faulty_run(arguments, Fault(1, 5, always=False, product="weight_gradient"))


SUSPICIONS = {  # step → verdict, why
    2: ("not examined", "did not end"),  # it ended an earlier start
    6: ("transient", "computed again"),  # a fault a step before the logged one
    8: ("reproducible", "all ranks agree"),  # a bad batch
    10: ("not examined", "lacks 1,024 MiB"),  # on one rank
}


def test_the_verdict_on_each_suspicion(ranks, data, tmp_path):
    """A step is not examined if that might end the run. A batch that is bad for all blames no
    rank. The run learns every second step of those before."""
    config = write_config(
        tmp_path, data, parallel={"dp_shard": 2}, run={"log_interval": 2},
        train={"steps": 10, "micro_batch_size": 4},
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    append_event(tmp_path / "run", "examining", step=2, cause="a spike")
    assert ranks.run(run_with_suspicions, 2, [config]) == ["", ""]
    found = suspicions(tmp_path)
    assert [event["step"] for event in found] == [*SUSPICIONS]
    for event in found:
        verdict, why = SUSPICIONS[event["step"]]
        assert (event["verdict"], event["ranks"]) == (verdict, [])
        assert why in event["why"]


def is_examined(judge: Examination, step: int, scale: float) -> bool:
    """Whether `judge` examines a bad step whose gradient norm is infinite."""
    judge._examine = Mock(return_value=Verdict("transient", ""))
    names, bad = ("loss", "grad_norm", "bad_in_a_row", "loss_scale"), (5.0, math.inf, 2.0, scale)
    found = SimpleNamespace(**dict(zip(names, map(torch.tensor, bad), strict=True)))
    judge.after_step(SimpleNamespace(batch=(), result=found, step_seconds=1.0, step=step))
    return judge._examine.called


@pytest.fixture
def judge():
    judge = Examination.__new__(Examination)
    judge.steps, judge.norms, judge.next_step = deque(), deque([1.0]), 0
    return judge


def test_an_overflow_of_float16_is_not_examined(judge):
    """Not even after a bad step: the scale was too large, which is no fault of a machine."""
    assert not is_examined(judge, 7, scale=2.0)
    assert is_examined(judge, 7, scale=1.0)


def test_a_pause_ends_although_the_run_went_back(judge):
    """100 steps after the step that it went back to, not after the undone step of the last
    examination."""
    judge.next_step = 1910 + examine.PAUSE
    judge.went_back(SimpleNamespace(step=1000), SimpleNamespace(step=1000))
    assert [is_examined(judge, step, scale=1.0) for step in (1099, 1100)] == [False, True]


def verdicts_after_a_scale_grew() -> list[str]:
    """A spike in the last step before the scale doubles, to one at which gradients overflow: the
    verdicts of a repetition at the step's scale and, as a control, at the next."""
    train = make_step(Case(MeshSizes(), dtype="float16", num_microbatches=1))
    rows, guard = tuple(rows_of(train)), train.guard
    # the norm is about 2, so at 2¹⁰ nothing overflows, and at 2³⁰ all does
    for exponent in range(10, 31):
        guard.loss_scale = torch.tensor(2.0**exponent)
        if not compute(train, *rows).norm < math.inf:
            break
    guard.loss_scale = last = guard.loss_scale / 2
    guard.restore([0.1, 0.2] * WINDOW, 0, (last.item(), GROWS_AFTER - 1))
    result = train(0, *rows)
    assert (result.bad_in_a_row, result.loss_scale, guard.loss_scale) == (1, last, 2 * last)
    found = []
    for scale in (result.loss_scale, guard.loss_scale):
        suspect = Suspect(rows, scale, result.loss.item(), result.grad_norm.item())
        found.append(examine.examine(train, suspect).verdict)
        assert guard.loss_scale == 2 * last
    return found


def test_a_step_in_float16_is_computed_again_at_its_scale(ranks):
    assert ranks.run(verdicts_after_a_scale_grew, 1) == [["reproducible", "transient"]]


def test_a_step_that_ended_a_start_is_never_examined_again(tmp_path):
    append_event(tmp_path, "examining", step=2, cause="a spike")
    for _ in range(2):  # it may end the next start again
        assert examine._did_not_end(tmp_path, 2)
        append_event(tmp_path, "suspicion", step=2, verdict="not examined")
    assert not examine._did_not_end(tmp_path, 3)
    # control: an examination that has ended
    append_event(tmp_path, "suspicion", step=2, verdict="transient")
    assert not examine._did_not_end(tmp_path, 2)


def run_with_slow_saves(arguments: list[str], fault: Fault | None) -> str:
    """The first save is still being written when copies are found to differ, and examined."""
    is_judged = threading.Event()

    @planted(examine.Examination, "of_replicas")
    def judged(of_replicas: Any, *about: Any) -> Any:
        found = of_replicas(*about)
        assert found.restart_helps == ("persistent" not in str(found))
        is_judged.set()
        return found

    @planted(Saver, "_write")
    def slow_write(write: Any, *about: Any) -> None:
        is_judged.wait(60)
        write(*about)

    with judged(), slow_write():
        if fault is None:
            return run_with_a_bit_flipped(arguments)
        return faulty_run(arguments, fault, run_with_a_bit_flipped)


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        pytest.param(None, "transient", marks=pytest.mark.thorough),
        # a bit that neither stops the loss nor raises it
        (Fault(1, 1, always=True, product="forward", bit=24), "persistent, rank 1"),
    ],
)
def test_copies_that_differ_are_examined_and_not_saved(ranks, data, tmp_path, fault, verdict):
    config = write_config(tmp_path, data, parallel={"dp_replicate": 2}, checkpoint={"interval": 1})
    for said in ranks.run(said_by, 2, run_with_slow_saves, [config], fault):
        assert re.search(rf"hold different numbers.* \({verdict}", said, re.DOTALL)
    assert len(suspicions(tmp_path)) == 1
    assert bool(excluded_nodes(tmp_path / "run")) == bool(fault)
    assert names(tmp_path / "run" / "checkpoints") == ["latest", "step-00000001"]
    status = status_of(tmp_path)
    assert (status["state"], "hold different numbers" in status["reason"]) == ("failed", True)


def test_a_compiled_model_has_no_products_to_compare():
    now = Computed(2.0, 1.0, torch.zeros(0, 2, dtype=torch.int64))
    train = SimpleNamespace(mesh=SimpleNamespace(device="cpu"))
    rows, one = (torch.zeros(1), torch.zeros(1)), torch.ones(())
    found = examine._compare_with_step(train, Suspect(rows, one), now)
    assert (found.verdict, "train.compile" in found.why) == ("not examined", True)
    found = examine._compare_with_step(train, Suspect(rows, one, 2.0, 1.0), now)
    assert (found.verdict, "train.compile" in found.why) == ("reproducible", True)
    # control: products that agree
    now.products = torch.ones(1, 2, dtype=torch.int64)
    found = examine._compare_with_step(train, Suspect(rows, one), now)
    assert (found.verdict, "all ranks agree" in found.why) == ("transient", True)


# what flips a bit of the first layer's products: ranks, the bit, and whether this machine repeats
# bits; and whom an examination names, and whether it is sure
FLIPS = [
    ({0, 2}, 30, True, ([0, 2], True)),  # rank 1 differs from both neighbours, too
    ({1}, 0, True, ([1], True)),  # rounding that repeats
    # on a GPU, a library may sum the same numbers in another order
    ({1}, 0, False, ([0, 1, 2], False)),
]


def verdicts_on(case: Case) -> list[tuple[list[int], bool]]:
    """The verdicts, after copies that differed were made equal."""
    found = []
    for faulty, bit, repeats, _ in FLIPS:
        train = make_step(case)
        tokens, targets = rows_of(train)
        if dist.get_rank() == 1:
            flip_a_bit(train, "norm.weight")
        examine.make_copies_equal(train)
        check_replicas(train)  # raises if they are not

        def flips(_: str, kind: str, compute: Compute, inputs: Inputs, bit: int = bit) -> Tensor:
            result = compute()
            if kind == "forward":
                flip(result, bit)
            return result

        if dist.get_rank() in faulty:
            wrap(dict([next(iter(linear_layers(train).items()))]), flips)
        with patch.object(examine, "_repeats_bits", lambda _, answer=repeats: answer):
            verdict = examine.examine(train, Suspect((tokens, targets), train.guard.loss_scale))
        assert verdict.verdict == "persistent"
        assert all(weight.parameter.grad is None for weight in train.weights)
        found.append((verdict.ranks, verdict.is_sure))
    return found


def test_who_is_named_and_nothing_is_left(ranks):
    case = Case(MeshSizes(dp_replicate=4), dtype="float32", num_microbatches=1)
    assert ranks.run(verdicts_on, 4, case) == [[named for *_, named in FLIPS]] * 4


def test_only_the_same_inputs_with_another_output_are_a_dispute():
    mine = torch.tensor([[1, 10], [2, 20], [3, 30], [4, 40]])
    other = torch.tensor([[1, 10], [2, 21], [9, 31], [4, 40]])
    assert disputes(mine, other) == [1]
    assert disputes(mine, mine) == []


def kernels_as_on_a_gpu() -> list[str]:
    """Whichever kernel of attention is wanted: those that a Hopper GPU would have in a step, in an
    examination, and in another step."""
    arguments = ["train.dtype=bfloat16", "train.seq_len=128", "model.num_layers=1",
                 "train.global_batch_size=1", "train.micro_batch_size=1", "parallel.tp=1",
                 "parallel.pp=1", "parallel.dp_shard=1"]  # fmt: skip
    rows, found = [torch.ones(1, 128, dtype=torch.int64)] * 2, []

    def noted(choice: Choice) -> Kernel:
        found.append(choice.kernel.name)
        return ON_CPU

    for wanted in ("cudnn", "flash3"):
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


def test_an_examination_has_kernels_whose_results_repeat(ranks):
    """Whichever kernel the run has; it is not refused, and the run has its own again."""
    (found,) = ranks.run(kernels_as_on_a_gpu, 1)
    assert found == ["cuDNN", "flash 2", "cuDNN", "flash 3", "flash 2", "flash 3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["forward", "input_gradient", "weight_gradient"])
def test_rounding_is_told_from_a_flipped_exponent_bit(dtype, kind):
    generator = torch.Generator().manual_seed(0)
    x, dy, weight = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((5, 3, 48), (5, 3, 32), (32, 48))
    )
    of_kind = {"forward": (x, weight), "input_gradient": (dy, weight), "weight_gradient": (dy, x)}
    inputs = of_kind[kind]
    given: list[torch.Tensor | None] = [each.double() for each in inputs]
    result = getattr(Matmul(), kind)(*inputs)
    assert _is_rounding(kind, result, given)
    before, bit = hash_of([result], "auto"), 30 if dtype == torch.float32 else 14
    for place in range(0, result.numel(), 7):
        flip(result, bit, place)
        assert hash_of([result], "auto") != before
        assert not _is_rounding(kind, result, given)
        flip(result, bit, place)
    # what a diverging run computes: neither says that the rank computes wrongly
    for value in (math.inf, math.nan, torch.finfo(dtype).max):
        spoilt = [inputs[0].clone(), inputs[1]]
        spoilt[0].view(-1)[0] = value
        result = getattr(Matmul(), kind)(*spoilt)
        assert _is_rounding(kind, result, [each.double() for each in spoilt])
