"""On suspicion, the step is computed again: a flipped bit in one rank's product is found, a
transient fault told from a persistent one, and neither is found where the data are to blame."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from errors import UserError
from model.kernels.attention import ON_CPU, Kernel
from model.kernels.attention_choice import PLANNED, Choice
from model.kernels.bit_hash import hash_of
from model.matmul import Matmul
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from parallel.weight_gradient import LinearProducts
from runtime.health import examine, refusal
from runtime.health.compare import Computed, _is_rounding, compute, disputes
from runtime.health.examine import Suspect, make_copies_equal
from runtime.health.excluded import excluded_nodes
from runtime.health.faults import FaultyProducts
from runtime.health.products import Wrapping, linear_layers
from runtime.health.replicas import check_replicas
from runtime.records.events import append_event, read_events
from tests.faulty_runs import flip_a_bit, run_with_a_bit_flipped
from tests.runs import LAYOUT_3D, fresh, losses, status_of, train_run, write_config
from tools.parity.cases import Case
from tools.parity.run import global_batch
from tools.ranks import RankError, Ranks
from training.build import build_stages
from training.load_config import load_config
from training.step import TrainStep

LAYOUTS = [
    LAYOUT_3D,  # and dp_shard 2
    pytest.param({"dp_shard": 4, "pp": 2}, marks=pytest.mark.thorough),
    pytest.param({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.thorough),
    pytest.param(
        {"cp": 2, "dp_shard": 2, "pp": 2, "schedule": "zb_h1"}, marks=pytest.mark.thorough
    ),
]


def suspicions(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run") if event["event"] == "suspicion"]


def fault(rank: int, times: str, bit: int = 30) -> str:
    layer = 3 if rank >= 4 else 1
    product = "weight_gradient" if times == "1" else "input_gradient"
    about = f"layer={layer},product={product},bit={bit},times={times}"
    return f"guard.inject_fault=rank={rank},step=3,{about}"


# --- runs with a fault ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rank", [1, pytest.param(6, marks=pytest.mark.thorough)])
def test_a_persistent_fault_names_its_rank_and_ends_the_run(
    ranks: Ranks, data: Path, tmp_path: Path, layout: dict[str, Any], rank: int
) -> None:
    parallel = {"dp_shard": -1, **layout}
    config = write_config(
        tmp_path, data, parallel=parallel, checkpoint={"interval": 2}, train={"steps": 5}
    )
    with pytest.raises(RankError, match=f"persistent, rank {rank} on "):
        ranks.run(train_run, 8, [config, fault(rank, "always")])
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
    parallel = {"dp_shard": -1, **layout}
    config = write_config(tmp_path, data, parallel=parallel, train={"steps": 4})
    found = []
    for examines in ("true", "false"):
        arguments = [config, fault(1, "1"), f"guard.examine={examines}"]
        arguments.append(f"run.dir={tmp_path / examines / 'run'}")
        assert ranks.run(train_run, 8, arguments) == [""] * 8
        found.append(losses(tmp_path / examines))
    assert [event["verdict"] for event in suspicions(tmp_path / "true")] == ["transient"]
    assert suspicions(tmp_path / "false") == []
    assert excluded_nodes(tmp_path / "true" / "run") == {}
    assert found[0] == found[1]


def run_with_a_bad_batch(arguments: list[str], bad: int) -> str:
    """Train with a loss that is not finite on the batch of step `bad`, whoever computes it: a batch
    is recognized by the sum of its tokens."""
    forward_backward, seen = TrainStep.forward_backward, []

    def broken(self: TrainStep, tokens: torch.Tensor, *others: Any, **options: Any) -> Any:
        total = tokens.sum()
        dist.all_reduce(total)
        if total not in seen:
            seen.append(int(total))
        loss, norm = forward_backward(self, tokens, *others, **options)
        return (loss * math.nan if seen.index(total) == bad - 1 else loss), norm

    with patch.object(TrainStep, "forward_backward", broken):
        return train_run(arguments)


def test_a_bad_batch_is_reproducible(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, parallel=LAYOUT_3D, train={"steps": 3})
    assert ranks.run(run_with_a_bad_batch, 8, [config], 3) == [""] * 8
    (event,) = suspicions(tmp_path)
    assert (event["step"], event["verdict"], event["ranks"]) == (3, "reproducible", [])


@pytest.mark.parametrize(("times", "verdict"), [("1", "transient"), ("always", "persistent")])
def test_a_step_before_the_logged_one(
    ranks: Ranks, data: Path, tmp_path: Path, times: str, verdict: str
) -> None:
    """Step 3 is bad, and the run learns of it after step 4."""
    config = write_config(tmp_path, data, parallel={"dp_shard": 4}, run={"log_interval": 2})
    arguments = [config, fault(2, times).replace("layer=3", "layer=1")]
    if times == "1":
        assert ranks.run(train_run, 4, arguments) == [""] * 4
    else:
        with pytest.raises(RankError, match="persistent, rank 2 on"):
            ranks.run(train_run, 4, arguments)
    (event,) = suspicions(tmp_path)
    assert (event["step"], event["verdict"]) == (4, verdict)


@pytest.mark.parametrize(
    ("times", "verdict"), [("1", "transient"), ("always", "persistent, rank 3")]
)
def test_copies_that_differ_are_examined(
    ranks: Ranks, data: Path, tmp_path: Path, times: str, verdict: str
) -> None:
    config = write_config(
        tmp_path, data, parallel={"dp_shard": 2, "tp": 2}, checkpoint={"interval": 2}
    )
    more = []
    if times == "always":  # a bit that neither stops the loss nor raises it
        more = ["guard.inject_fault=rank=3,step=1,layer=1,product=forward,bit=24,times=always"]
    with pytest.raises(RankError, match=rf"hold different numbers.* \({verdict}"):
        ranks.run(run_with_a_bit_flipped, 4, [config, *more])
    assert len(suspicions(tmp_path)) == 1
    assert bool(excluded_nodes(tmp_path / "run")) == (times == "always")


@pytest.mark.thorough
def test_two_hundred_undisturbed_steps_raise_no_suspicion(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, data, parallel=LAYOUT_3D, train={"steps": 200}, checkpoint={"interval": 50}
    )
    assert ranks.run(train_run, 8, [config, "run.log_interval=5"]) == [""] * 8
    assert suspicions(tmp_path) == []
    assert not (tmp_path / "run" / "excluded.json").exists()


def run_without_memory(arguments: list[str]) -> str:
    lacking = (1 << 30) if dist.get_rank() == 1 else -1
    with patch.object(refusal, "_lacking_bytes", lambda device: lacking):
        return train_run(arguments)


def test_it_is_not_examined_if_that_might_end_the_run(
    ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """If one rank lacks memory; or if an examination of this step has ended the run before."""
    config = write_config(tmp_path, data, parallel={"dp_shard": 2}, train={"steps": 3})
    arguments = [config, fault(1, "1").replace("layer=3", "layer=1")]
    assert ranks.run(run_without_memory, 2, arguments) == ["", ""]
    (event,) = suspicions(tmp_path)
    assert (event["verdict"], event["ranks"]) == ("not examined", [])
    assert "lacks 1,024 MiB" in event["why"]
    fresh(tmp_path)
    (tmp_path / "run").mkdir()
    append_event(tmp_path / "run", "examining", step=3, cause="a spike")
    for _ in range(2):
        assert ranks.run(train_run, 2, arguments) == ["", ""]  # it saves nothing, so it begins anew
    first, second = suspicions(tmp_path)
    assert (first["verdict"], "did not end" in first["why"]) == ("not examined", True)
    assert second["verdict"] == "not examined"  # nor ever: it may end the run again


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


def copies_after(case: Case) -> tuple[bool, bool]:
    """Whether copies that differ are equal after make_copies_equal; and whether computing twice
    gives the same bits, and leaves no gradients."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(case.world), "cpu", config.model.has_experts)
    train = TrainStep(config, mesh, build_stages(config, mesh))
    if dist.get_rank() == 1:
        flip_a_bit(train, "norm.weight")
    make_copies_equal(train)
    check_replicas(train)
    rows = [t.chunk(mesh.dp_size)[mesh.dp_rank] for t in global_batch(case.vocab_size, 0)]
    first, again = compute(train, *rows), compute(train, *rows)
    assert len(first.products) >= 9 * case.config().model.num_layers
    return torch.equal(first.products, again.products), all(
        weight.parameter.grad is None for weight in train.weights
    )


def test_copies_are_made_equal_and_products_repeat(ranks: Ranks) -> None:
    case = Case(MeshSizes(dp_replicate=2, tp=2))
    assert ranks.run(copies_after, 4, case) == [(True, True)] * 4


def verdict_on(case: Case, faulty: set[int], bit: int, repeats: bool) -> tuple[list[int], bool]:
    """The ranks that an examination names, and whether it is sure, if the `faulty` ones flip a bit
    of the first layer's products."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(case.world), "cpu", config.model.has_experts)
    train = TrainStep(config, mesh, build_stages(config, mesh))

    def flips(inner: LinearProducts, name: str) -> FaultyProducts:
        products = FaultyProducts(inner, name)
        products.kind, products.bit, products.left = "forward", bit, math.inf
        return products

    if dist.get_rank() in faulty:
        name, layer = next(iter(linear_layers(train).items()))
        Wrapping({name: layer}, flips).install()
    rows = [t.chunk(mesh.dp_size)[mesh.dp_rank] for t in global_batch(case.vocab_size, 0)]
    with patch.object(examine, "_repeats_bits", lambda train: repeats):
        found = examine.examine(train, Suspect((rows[0], rows[1])))
    assert found.verdict == "persistent"
    return found.ranks, found.is_sure


def test_a_rank_between_two_faulty_ones_is_not_at_fault(ranks: Ranks) -> None:
    """It differs from both neighbours, too."""
    case = Case(MeshSizes(dp_replicate=4), dtype="float32")
    assert ranks.run(verdict_on, 4, case, {0, 2}, 30, True) == [([0, 2], True)] * 4


@pytest.mark.parametrize(("repeats", "ranks_named", "sure"), [
    (True, [1], True),
    (False, [0, 1, 2], False),
])  # fmt: skip
def test_no_rank_is_surely_at_fault_for_rounding_that_may_vary(
    ranks: Ranks, repeats: bool, ranks_named: list[int], sure: bool
) -> None:
    """On a GPU, a library may sum the same numbers in another order."""
    case = Case(MeshSizes(dp_replicate=4), dtype="float32")
    assert ranks.run(verdict_on, 4, case, {1}, 0, repeats) == [(ranks_named, sure)] * 4


def test_only_the_same_inputs_with_another_output_are_a_dispute() -> None:
    mine = torch.tensor([[1, 10], [2, 20], [3, 30], [4, 40]])
    other = torch.tensor([[1, 10], [2, 21], [9, 31], [4, 40]])
    assert disputes(mine, other) == [1]
    assert disputes(mine, mine) == []


def kernels_as_on_a_gpu(wanted: str) -> list[str]:
    """The kernels of attention that a Hopper GPU would have in a step, in an examination, and in
    another step."""
    names: list[str] = []

    def noted(choice: Choice) -> Kernel:
        names.append(choice.kernel.name)
        return ON_CPU

    arguments = [f"model.attention_kernel={wanted}", "train.dtype=bfloat16", "train.seq_len=128"]
    arguments += ["model.num_layers=2", "train.global_batch_size=1", "train.micro_batch_size=1"]
    arguments += ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1"]
    config = load_config("configs/laptop.yaml", arguments)
    mesh = build_mesh(MeshSizes(), "cpu")
    step = TrainStep(config, mesh, build_stages(config, mesh))
    rows = torch.ones(1, 128, dtype=torch.int64), torch.ones(1, 128, dtype=torch.int64)
    with (
        patch("model.mask.device_of", lambda _: PLANNED._replace(flash3=True)),
        patch("model.mask.made_ready", noted),
    ):
        step(0, *rows)
        compute(step, *rows)
        step(1, *rows)
    return names


@pytest.mark.parametrize("wanted", ["cudnn", "flash3"])
def test_an_examination_has_kernels_whose_results_repeat(ranks: Ranks, wanted: str) -> None:
    """Whichever kernel the run has; it is not refused, and the run has its own again."""
    (names,) = ranks.run(kernels_as_on_a_gpu, 1, wanted)
    usual = {"cudnn": "cuDNN", "flash3": "flash 3"}[wanted]
    assert names == [usual, "flash 2", usual]


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


# --- the key --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("rank=3", "is not of the form"),
        ("rank=9,step=2,layer=1,product=forward,bit=30,times=1", "there are 2 ranks"),
        ("rank=1,step=2,layer=9,product=forward,bit=30,times=1", "has no linear layer in layer 9"),
        ("rank=1,step=2,layer=1,product=forward,bit=32,times=1", "a float32 has 32 bits"),
    ],
)
def test_a_fault_that_cannot_be_injected_is_refused(
    ranks: Ranks, data: Path, tmp_path: Path, value: str, why: str
) -> None:
    config = write_config(tmp_path, data)
    said = ranks.run(train_run, 2, [config, f"guard.inject_fault={value}"])
    assert len(set(said)) == 1
    assert said[0].startswith("guard.inject_fault")
    assert why in said[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_no_fault_is_injected_unless_asked_for(data: Path, tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, data), [])
    assert config.guard.inject_fault == ""
    with pytest.raises(UserError, match="inject_fault"):
        load_config(write_config(tmp_path, data), ["guard.inject_fault=on"])
