"""The model: how weights are drawn, its positions, and its z-loss. (What its initial
weights are and what it computes, test_parity.py and test_huggingface.py compare.)"""

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.config import RopeScaling
from model.initialise import draw_rows
from model.kernels.rotary import rotate
from model.positions import Rotary, rotary_angles
from parallel.axes import MeshSizes
from parallel.parameter import weights_of
from proofs.parity import reference_causal
from proofs.parity.cases import Case
from tests.steps import make_step, rows_of


def test_rows_are_the_same_whoever_draws_them():
    """Rows have the same numbers however they are split, also across the blocks in which they are
    drawn. All rows differ, as do names and seeds."""
    shape = torch.Size((300, 700))  # several blocks
    whole = draw_rows("x", shape, range(300), 1.0, seed=1)
    cuts = [0, 1, 92, 93, 94, 187, 299, 300]
    pieces = [draw_rows("x", shape, range(a, b), 1.0, seed=1) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)
    assert whole.unique(dim=0).shape == whole.shape
    assert not torch.equal(whole, draw_rows("y", shape, range(300), 1.0, seed=1))
    assert not torch.equal(whole, draw_rows("x", shape, range(300), 1.0, seed=2))


def test_draws_have_their_standard_deviation_and_no_mean():
    drawn = draw_rows("x", (512, 512), range(512), 0.005, seed=0)
    assert drawn.std().item() == pytest.approx(0.005, rel=0.01)
    assert drawn.mean().abs().item() < 5 * 0.005 / 512


LLAMA_3_1 = RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("scaling", [(), (LLAMA_3_1,), (RopeScaling(3.0, 0.5, 2.0, 4),)], ids=str)
def test_rotation_is_the_references(scaling):
    torch.manual_seed(0)
    x = torch.randn(16, 2, 4, 8, dtype=torch.float64)  # [S, B, H, E]
    positions = torch.arange(16).unsqueeze(1)
    angles = rotary_angles(positions, Rotary(8, 10000.0, *scaling), torch.float64)
    ours, _ = rotate(x, x, *angles, kernels="torch")
    factor, low, high, original = scaling[0] if scaling else RopeScaling(1.0, 1.0, 4.0, 8192)
    config: Any = SimpleNamespace(
        rope_theta=1e4, rope_scaling_factor=factor, rope_low_freq_factor=low,
        rope_high_freq_factor=high, rope_original_length=original,
    )  # fmt: skip
    theirs = reference_causal.rotate(x.permute(1, 2, 0, 3), config).permute(2, 0, 1, 3)
    assert (ours - theirs).abs().max() < 1e-14


def test_angles_are_exact_enough_to_tell_positions_apart():
    """Angles are float32 even for bfloat16 models, because bfloat16 angles would be equal at
    positions 256 and 257. Float32 angles are off by about 0.01 rad at position 128k; models in
    float64 have float64 angles, so that proofs are exact."""
    positions = torch.tensor([[256], [257], [131_071]])
    for dtype, exact in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        cos, sin = rotary_angles(positions, Rotary(128, 500000.0), dtype)
        assert cos.dtype == sin.dtype == exact
        assert not torch.equal(cos[0], cos[1])
        for row, position in enumerate(positions.flatten().tolist()):
            truth = (position * 500_000.0 ** (-torch.arange(64).double() / 64)).cos()
            error = (cos[row].double().flatten() - truth).abs().max()
            assert error < (1e-9 if exact == torch.float64 else 2e-2)


def z_loss_and_unnamed_weight():
    """With z-loss and without: the mean loss of a batch of packed documents in evaluation, and in
    training, where it is the model's own. Then a weight that does not say what it is gets refused,
    and a buffer.
    """
    config, found = Case(MeshSizes(), document_mask=True).config(), []
    for z_loss in (0.1, 0.0):
        step = make_step(replace(config, model=replace(config.model, z_loss=z_loss)))
        evaluated, targets = step.evaluate(*rows_of(step))
        trained, _ = step.forward_backward(*rows_of(step))
        found.append(((evaluated / targets).item(), trained.item()))
    (stage,) = step.stages.values()
    stage.norm.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))
    stage.head.register_buffer("scale", torch.ones(1))
    with pytest.raises(AssertionError, match=re.escape("['head.scale', 'norm.bias']")):
        weights_of(stage)
    return found


def test_z_loss_is_added_in_training_only_and_a_parameter_must_say_what_it_is(ranks):
    ((with_it, without),) = ranks.run(z_loss_and_unnamed_weight, 1)
    assert with_it[0] == pytest.approx(without[1], rel=1e-12)
    assert with_it[1] > without[1] + 0.1
