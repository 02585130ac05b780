"""benchmarks/experts_loss.py and experts_cpu.py compare like with like."""

import dataclasses

from benchmarks import experts_loss
from benchmarks.experts_cpu import AS_MIXTRAL, EXPERTS, SAME, mixtral, mixtral_step, our_step, ours
from benchmarks.train_cpu import random_batches
from proofs.ranks import Ranks

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
