"""Two exercises for docs/memory.md: complete the functions, then run `.venv/bin/python -m pytest
docs/exercises/test_memory.py`."""

from dataclasses import replace

import pytest

from costs.timeline import Timeline
from costs.units import kind_of, unit
from parallel.pipeline.schedules import build_schedule
from parallel.pipeline.simulate import Costs, simulate
from settings.load import load_config


def kept_per_token(dim: int, ffn_dim: int, num_heads: int, num_kv_heads: int, tp: int) -> float:
    """Return how many numbers a block keeps per token between forward and backward, on one of `tp`
    ranks with sequence parallelism, if nothing is recomputed. Leave out tensors with only one
    number per token.

    A block keeps two norms, a sum and its output, each D wide; queries and the result of attention,
    and keys and values, by heads; gate, up and their product, each F wide. Which of them does tp
    split? (All of them, because of sequence parallelism.)
    """
    raise NotImplementedError("yours to write")


def micro_batches_alive(rank: int, p: int, m: int) -> int:
    """Return the largest number of micro-batches whose activations pipeline rank `rank` holds at
    the same time, under 1F1B with p ranks and m micro-batches."""
    raise NotImplementedError("yours to write")


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3_405b"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_what_a_block_keeps(name: str, tp: int) -> None:
    config = load_config(f"configs/{name}.yaml", [f"parallel.tp={tp}", "parallel.dp_shard=-1"])
    model = config.model
    setting = replace(config.setting(), activation_checkpointing="none")
    block = unit(setting, kind_of(model, 0))
    kept = sum(block.phases()["forward"].effect.changes.values())
    numbers = kept / setting.seq_len / setting.micro_batch_size / setting.dtype.itemsize
    # tensors with one number per token are one or two thousandths of it
    yours = kept_per_token(model.dim, model.ffn_dim, model.num_heads, model.num_kv_heads, tp)
    assert yours == pytest.approx(numbers, rel=0.005)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (4, 8), (4, 2), (8, 8)])
def test_alive(p: int, m: int) -> None:
    timeline = Timeline(simulate(build_schedule("1f1b", p, 1, m), Costs.equal(p)))
    assert [micro_batches_alive(rank, p, m) for rank in range(p)] == [
        timeline.peak_live(rank) for rank in range(p)
    ]
