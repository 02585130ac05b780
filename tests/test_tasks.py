"""Evaluation on tasks: the same log-likelihoods on every layout, and what is scored."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.tokenizer import Tokenizer
from errors import UserError
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from runtime.tasks.files import Example, Task, read_tasks
from runtime.tasks.rows import Row, TaskRows, Text, log_likelihoods, measures, tokenize, windows
from runtime.tasks.scoring import PipelineScorer, lengths
from tests.data_samples import tokenizer
from tests.runs import train_run, write_config
from tools.parity.cases import BOS, SEED, SEQ_LEN, Case
from tools.parity.run import reference_model
from tools.ranks import Ranks
from training.build import build_stages
from training.precision import DTYPES
from training.step import TrainStep

# --- the same on every layout ---------------------------------------------------------------------

CASES = {
    "pp 2, tp 2": Case(MeshSizes(pp=2, tp=2), tp_pieces=2),
    "cp 2, dp_shard 2": Case(MeshSizes(cp=2, dp_shard=2), zero_stage=3),
    "pp 2, cp 2, tp 2": Case(MeshSizes(pp=2, cp=2, tp=2), schedule="zb_v", stages_per_rank=2),
    "ep 2, dp_replicate 2": Case(
        MeshSizes(dp_replicate=2, dp_shard=2, ep=2), router="sigmoid_bias"
    ),
    "one rank": Case(MeshSizes(), document_mask=True),
}


def some_rows(vocab_size: int) -> list[Row]:
    """Rows of all lengths from 1 to SEQ_LEN inputs, with different numbers of scored tokens."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(21):
        inputs = number % SEQ_LEN + 1
        tokens = generator.integers(0, vocab_size, inputs + 1).astype(np.int32)
        tokens[0] = BOS
        rows.append(Row(tokens, generator.integers(1, inputs + 1)))
    return rows


def scored(case: Case, shortest: int) -> list[float] | None:
    from unittest.mock import patch

    config = case.config()
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    mesh = build_mesh(sizes, "cpu", config.model.has_experts)
    train = TrainStep(config, mesh, build_stages(config, mesh), BOS)
    with patch("runtime.tasks.scoring.SHORTEST", shortest):
        return PipelineScorer(train, SEQ_LEN)(some_rows(case.vocab_size))


def expected(case: Case) -> list[float]:
    """Each row by itself, unpadded, by the plain implementation."""
    model = case.config().model
    reference = reference_model(model, DTYPES[case.dtype], SEED)
    found = []
    for row in some_rows(case.vocab_size):
        tokens = torch.from_numpy(row.tokens).long()
        logits: Tensor = reference(tokens[None, :-1])[0].log_softmax(-1)
        values = logits.gather(1, tokens[1:, None]).squeeze(1)
        found.append(values[-row.scored :].sum().item())
    return found


@pytest.mark.parametrize("name", CASES)
def test_log_likelihoods_are_those_of_the_reference(ranks: Ranks, name: str) -> None:
    """In float64, each row's log-likelihood is that of the unsharded model on the row by itself,
    although rows are padded, batched, and cut over the ranks; all ranks have the same."""
    case = CASES[name]
    results = ranks.run(scored, case.world, case, 4)
    assert all(result == results[0] for result in results)
    wanted = expected(case)
    worst = max(abs(a - b) for a, b in zip(results[0], wanted, strict=True))
    print(f"{name}: the largest difference of {len(wanted)} log-likelihoods is {worst:.1e}")
    assert worst < 1e-9
    # Control: rows differ by far more than that, so none stands at another's place.
    apart = np.abs(np.subtract.outer(wanted, wanted))[~np.eye(len(wanted), dtype=bool)]
    assert apart.min() > 1e-6
