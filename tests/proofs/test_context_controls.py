"""Controls for context parallelism: each test plants a known fault of such code in the ranks, and
the comparison with the unsharded model must report it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import model.positions
import parallel.context
import training.step
from model.mask import Mask
from parallel.axes import MeshSizes
from parallel.context import BesideEachOther, Gather, SplitAttention
from proofs.parity.cases import Case
from proofs.parity.run import check
from tests.planted import gradients_averaged, name_of, planted, replicas_counted_in_the_norm
from tests.proofs.context_batches import CP2, check_batch, other_keys_in_backward, with_rows
from tokens import IGNORE
from training.step import TrainStep


@planted(TrainStep, "microbatches")
def labels_shifted_after_the_cut(honest, *rows, **settings):
    """A token's target is the next token of the rank's part: another one where a chunk ends."""

    def local(one):
        shifted = torch.cat((one.tokens[1:], one.targets[-1:]))
        return replace(one, targets=torch.where(one.targets == IGNORE, IGNORE, shifted))

    return [local(one) for one in honest(*rows, **settings)]


@planted(model.positions, "rotary_angles")
def rotation_by_local_positions(rotary_angles, positions, *arguments):
    """Each rank counts the positions of its own tokens from 0."""
    return rotary_angles(torch.arange(len(positions)).unsqueeze(1), *arguments)


@planted(model.positions, "make_mask")
def mask_by_local_positions(*_):
    """Query i of a chunk sees keys 0 to i, as torch's `is_causal` does."""
    return Mask()


@planted(training.step, "find_documents")
def documents_found_after_the_cut(honest, tokens, bos_id, device, parts, *compiled):
    """Each rank finds the documents of its own tokens, as if its part were a sequence."""
    mine = torch.cat([tokens[:, part] for part in map(list, parts)], dim=1)
    local, _ = honest(mine, bos_id, device, [range(mine.shape[1])])
    positions, documents = honest(tokens, bos_id, device, parts, *compiled)
    positions[[i for part in parts for i in part]] = local
    return positions, documents


@planted(SplitAttention, "__call__")
def nothing_gathered(_, self, q, k, v):
    """A rank's queries see only the keys of that rank."""
    return Mask()(q, k, v)


@planted(TrainStep, "count_targets")
def targets_counted_once_per_rank(count_targets, self, targets):
    """The loss is a mean over cp ranks."""
    return count_targets(self, targets) * self.cp.size


@planted(TrainStep, "sum_over_ranks")
def loss_of_one_rank(sum_over_ranks, self, loss):
    """A rank's loss is not summed over cp."""
    with patch.object(self, "mesh", replace(self.mesh, loss=self.mesh.batch)):
        return sum_over_ranks(self, loss)


@planted(Gather, "backward")
def gradients_of_one_chunk(backward, ctx, *gradients):
    """The gradients of keys and values that come from a rank's low chunk are lost."""
    lost = [torch.zeros_like(gradient) for gradient in gradients[:-2]]
    return backward(ctx, *lost, *gradients[-2:])


@planted(parallel.context, "in_order")
def keys_in_the_order_of_ranks(_, gathered, ranks):
    """Gathered keys and values are not put in the order of the sequence."""
    return gathered


@planted(parallel.context, "sum_by_rank")
def gradients_in_the_order_of_the_sequence(_, gradients, total, ranks):
    """The gradients of keys and values are scattered as if ranks' parts were contiguous."""
    total.zero_()
    for gradient in gradients:
        total[: len(gradient)].add_(gradient)


@planted(BesideEachOther, "backward")
def gradients_of_other_heads(backward, ctx, *placeholders):
    """The pieces of the heads change places in backward."""
    ctx.pieces = ctx.pieces[::-1]
    return backward(ctx, *placeholders)


@pytest.mark.parametrize(
    ("bug", "case", "where"),
    [
        (labels_shifted_after_the_cut, CP2, {"gradient", "loss", "norm"}),
        (rotation_by_local_positions, CP2, {"gradient", "loss", "norm"}),
        (mask_by_local_positions, CP2, {"gradient", "loss", "norm"}),
        (documents_found_after_the_cut, replace(CP2, document_mask=True),
         {"gradient", "loss", "norm"}),
        (nothing_gathered, CP2, {"gradient", "loss", "norm"}),
        (targets_counted_once_per_rank, CP2, {"gradient", "loss", "norm"}),
        (loss_of_one_rank, CP2, {"loss", "spread"}),
        (gradients_averaged, CP2, {"gradient", "norm"}),
        (gradients_of_one_chunk, CP2, {"gradient", "norm"}),
        (keys_in_the_order_of_ranks, CP2, {"gradient", "loss", "norm"}),
        (gradients_in_the_order_of_the_sequence, CP2, {"gradient", "norm"}),
        (gradients_of_other_heads, CP2, {"gradient", "norm"}),
        (other_keys_in_backward, with_rows(replace(CP2, num_kv_heads=8), 1), {"gradient", "norm"}),
        (other_keys_in_backward, with_rows(CP2, 1), {"gradient", "norm"}),
    ],
    ids=name_of,
)  # fmt: skip
def test_planted_bug_is_found(ranks, bug, case, where):
    assert where <= set((row := check(ranks, case, sabotage=bug)).failures()), row.crash
    assert "weights" not in row.failures()


@pytest.mark.parametrize(
    "bug", [rotation_by_local_positions, documents_found_after_the_cut], ids=name_of
)
def test_planted_bug_is_found_in_the_batch_of_documents(ranks, bug):
    case = with_rows(Case(MeshSizes(cp=4), document_mask=True), 2)
    assert {"gradient", "loss"} <= set(check_batch(ranks, case, "all", bug).failures())


def test_replicas_over_cp_are_counted_once_in_the_norm(ranks):
    """With zero_stage 0 every cp rank holds all weights. Control: counted once per replica."""
    case = Case(MeshSizes(cp=2), zero_stage=0)
    row = check(ranks, case, sabotage=replicas_counted_in_the_norm)
    assert row.failures() == ["norm"], row.crash
