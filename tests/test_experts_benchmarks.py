"""benchmarks/experts_loss.py and experts_cpu.py: they compare like with like, and the recorded
figures are those of the code and of docs/experts.md."""

import dataclasses
import json
import statistics

from benchmarks import experts_cpu, experts_loss
from benchmarks.experts_cpu import AS_MIXTRAL, EXPERTS, SAME, mixtral, mixtral_step, our_step, ours
from benchmarks.train_cpu import random_batches
from model.transformer import num_active_parameters, num_parameters
from tools.ranks import Ranks

PAGE = experts_loss.ROOT / "docs/experts.md"
SMALL = ["parallel.ep=1", "train.global_batch_size=2", "train.micro_batch_size=1",
         "train.seq_len=32"]  # fmt: skip


def test_both_runs_do_the_same_work() -> None:
    dense, experts = experts_loss.read("dense"), experts_loss.read("experts")
    assert experts_loss.same_work(dense, experts)
    # Controls: another expert for each token, and other tokens
    model = dataclasses.replace(experts.model, experts_per_token=3)
    assert not experts_loss.same_work(dense, dataclasses.replace(experts, model=model))
    train = dataclasses.replace(experts.train, steps=dense.train.steps + 1)
    assert not experts_loss.same_work(dense, dataclasses.replace(experts, train=train))


def first_losses() -> list[float]:
    """Of the experts as Mixtral, of Mixtral in both ways, and of the experts as configured."""
    config, train = ours(EXPERTS, [*SMALL, *AS_MIXTRAL])
    steps = [our_step(train)]
    steps += [mixtral_step(config, mixtral(config, train, how)) for how in ("eager", "grouped_mm")]
    steps += [our_step(ours(EXPERTS, SMALL)[1])]
    (rows,) = random_batches(config.model.vocab_size, 2, 32, 1)
    return [step(0, rows) for step in steps]


def test_mixtral_computes_the_same_loss(ranks: Ranks) -> None:
    expected, *theirs, configured = ranks.run(first_losses, 1)[0]
    assert all(abs(loss / expected - 1) < SAME for loss in theirs)
    assert abs(configured / expected - 1) > SAME, "control: another router must show"


def test_the_recorded_figures_are_on_the_page() -> None:
    losses = json.loads(experts_loss.RESULTS.read_text(encoding="utf-8"))["models"]
    cpu = json.loads(experts_cpu.RESULTS.read_text(encoding="utf-8"))
    ratios = cpu["ratios"]
    assert losses["experts"]["mean"] < losses["dense"]["mean"]
    rows = []
    for name in experts_loss.CONFIGS:
        model, recorded = experts_loss.read(name).model, losses[name]
        assert recorded["parameters"] == num_parameters(model)
        assert recorded["active_parameters"] == num_active_parameters(model)
        assert recorded["mean"] == statistics.mean(recorded["losses"])
        sizes = f"{recorded['parameters']:,} | {recorded['active_parameters']:,}"
        times = [part["experts_over_dense"]["median"] for part in (ratios, cpu["eight_processes"])]
        shown = " | ".join(f"{time:.2f}" if name == "experts" else "1" for time in times)
        stem = experts_loss.CONFIGS[name].removeprefix("configs/").removesuffix(".yaml")
        rows.append(f"| {stem} | {sizes} | {recorded['mean']:.3f} | {shown} |")
    text = PAGE.read_text(encoding="utf-8")
    assert "\n".join(rows) in text
    slower = [1 / ratios[key]["median"] for key in experts_cpu.RATIOS if "mixtral" in key]
    assert f"Mixtral takes {min(slower):.2f} times ours" in text
