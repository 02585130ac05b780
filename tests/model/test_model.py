"""The model: its number of parameters, how weights are drawn, and its positions. (What its initial
weights are and what it computes, test_parity.py and test_huggingface.py compare.)"""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from model.config import RopeScaling
from model.documents import find_documents
from model.initialise import draw_rows
from model.kernels.rotary import rotate
from model.positions import Rotary, rotary_angles
from model.transformer import num_parameters
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from proofs.parity import reference
from proofs.parity.cases import BOS, Case
from proofs.parity.run import reference_model
from tests.proofs.parity_tiers import agrees
from tests.steps import make_step, rows_of
from training.build import build_stages


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": True}, {"attention_dim": 64, "qk_norm": True}], ids=str
)
def test_num_parameters_counts_what_there_is(options):
    config = Case(MeshSizes(), **options).config().model
    reference = reference_model(config, torch.float32, seed=0)
    assert num_parameters(config) == sum(p.numel() for p in reference.parameters())


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


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_tp_ranks_share_key_value_heads(ranks, num_kv_heads):
    """On more tp ranks than key/value heads, each rank uses the head of its queries."""
    agrees(ranks, Case(MeshSizes(tp=4), num_kv_heads=num_kv_heads))


LLAMA_3_1 = RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("scaling", [(), (LLAMA_3_1,), (RopeScaling(3.0, 0.5, 2.0, 4),)], ids=str)
def test_rotation_is_the_references(scaling):
    torch.manual_seed(0)
    x = torch.randn(16, 2, 4, 8, dtype=torch.float64)  # [S, B, H, E]
    positions = torch.arange(16).unsqueeze(1)
    angles = rotary_angles(positions, Rotary(8, 10000.0, *scaling), torch.float64)
    ours, _ = rotate(x, x, *angles, kernels="torch")
    rotary = reference.Rotary(1e4, *(scaling[0] if scaling else ()))
    theirs = reference.rotate(x.permute(1, 2, 0, 3), rotary).permute(2, 0, 1, 3)
    assert (ours - theirs).abs().max() < 1e-14


def test_scaled_frequencies_are_those_of_hugging_face():
    """Of Llama 3.1: some are unchanged, some interpolated, some divided by eight."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import _compute_llama3_parameters

    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    theirs = LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=rope)
    expected, _ = _compute_llama3_parameters(theirs, device=None)
    position = torch.ones(1, 1, dtype=torch.int64)
    for scaling, same in ((LLAMA_3_1, True), (LLAMA_3_1._replace(high_freq_factor=5.0), False)):
        cos, sin = rotary_angles(position, Rotary(128, 500000.0, scaling), torch.float64)
        # The angle at position 1 is the frequency, which is at most 1.
        found = torch.atan2(sin, cos).flatten()
        assert torch.allclose(found, expected.double(), rtol=1e-6, atol=0) is same


def test_angles_are_exact_enough_to_tell_positions_apart():
    """Angles are float32 even for bfloat16 models, because bfloat16 angles would be equal at
    positions 256 and 257. Float32 angles are off by about 0.01 rad at position 128k; models in
    float64 have float64 angles, so that proofs are exact."""
    positions = torch.tensor([[256], [257], [131_071]])
    for dtype, exact in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        cos, sin = rotary_angles(positions, Rotary(128, 500000.0), dtype)
        assert cos.dtype == sin.dtype == exact
        assert not torch.equal(cos[0], cos[1])
        for row, position in enumerate(positions.flatten().tolist()):
            truth = (position * 500_000.0 ** (-torch.arange(64).double() / 64)).cos()
            error = (cos[row].double().flatten() - truth).abs().max()
            assert error < (1e-9 if exact == torch.float64 else 2e-2)


def weight_that_says_nothing(case):
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), "cpu")
    (stage,) = build_stages(config, mesh).values()
    stage.norm.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(AssertionError, match=re.escape("['norm.bias']")):
        weights_of(stage)


def test_a_parameter_must_say_what_it_is(ranks):
    ranks.run(weight_that_says_nothing, 1, Case(MeshSizes()))


def losses(z_loss):
    """Mean loss of a batch in evaluation, and in training, where it is the model's own."""
    config = Case(MeshSizes()).config()
    step = make_step(replace(config, model=replace(config.model, z_loss=z_loss)))
    evaluated, targets = step.evaluate(*rows_of(step))
    trained, _ = step.forward_backward(*rows_of(step))
    return (evaluated / targets).item(), trained.item()


def test_z_loss_is_added_in_training_only(ranks):
    (with_it,), (without,) = (ranks.run(losses, 1, z_loss) for z_loss in (0.1, 0.0))
    assert with_it[0] == pytest.approx(without[1], rel=1e-12)
    assert with_it[1] > without[1] + 0.1


@pytest.mark.parametrize("size", [3, 4, 6])
def test_a_part_has_the_keys_of_its_documents(size):
    """Of each sequence: of the first document in the part also the keys before the part, of the
    others those in the part."""
    begins = {0: (0, 2, 7), 1: (0, 5, 10), 2: (0, 11)}  # of documents, in 12 tokens
    tokens = torch.full((3, 12), 9)
    for sequence, places in begins.items():
        tokens[sequence, list(places)] = BOS
    parts = [range(start, start + size) for start in range(0, 12, size)]
    _, found = find_documents(tokens, BOS, "cpu", parts)
    for part, documents in zip(parts, found, strict=True):
        queries, keys = [0], [0]
        for places in begins.values():
            for begin, end in pairwise((*places, 12)):
                if begin < part.stop and end > part.start:
                    last = min(end, part.stop)
                    queries.append(queries[-1] + last - max(begin, part.start))
                    keys.append(keys[-1] + last - begin)
        assert documents.queries.tolist() == queries
        assert documents.keys.tolist() == keys
