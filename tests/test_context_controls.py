"""Controls for context parallelism: each test plants a known fault of such code in the ranks, and
the comparison with the unsharded model must report it."""

import contextlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import model.positions
import parallel.context
import training.step
from model.mask import Mask
from parallel.axes import MeshSizes
from parallel.context import BesideEachOther, Gather, Piece, SplitAttention
from tests.test_context_parallel import CP2, check_batch, with_rows
from tests.test_controls import gradients_averaged, name_of, replicas_counted_in_the_norm
from tokens import IGNORE
from tools.parity.cases import Case
from tools.parity.run import check
from training.step import TrainStep


@contextlib.contextmanager
def labels_shifted_after_the_cut():
    """Plant: a token's target is the next token of the rank's part, which is another one at the end
    of a chunk."""
    honest = TrainStep.microbatches

    def local(one):
        shifted = torch.cat((one.tokens[1:], one.targets[-1:]))
        return replace(one, targets=torch.where(one.targets == IGNORE, IGNORE, shifted))

    def microbatches(self, *rows, **settings):
        return [local(one) for one in honest(self, *rows, **settings)]

    with patch.object(TrainStep, "microbatches", microbatches):
        yield


@contextlib.contextmanager
def rotation_by_local_positions():
    """Plant: each rank counts the positions of its own tokens from 0."""
    honest = model.positions.rotary_angles

    def rotary_angles(positions, *arguments):
        return honest(torch.arange(len(positions)).unsqueeze(1), *arguments)

    with patch.object(model.positions, "rotary_angles", rotary_angles):
        yield


@contextlib.contextmanager
def mask_by_local_positions():
    """Plant: query i of a chunk sees keys 0 to i, as torch's `is_causal` does."""
    with patch.object(model.positions, "make_mask", lambda *arguments: Mask()):
        yield


@contextlib.contextmanager
def documents_found_after_the_cut():
    """Plant: each rank finds the documents of its own tokens, as if its part were a sequence."""
    honest = training.step.find_documents

    def find_documents(tokens, bos_id, device, parts, *compiled):
        mine = torch.cat([tokens[:, part] for part in map(list, parts)], dim=1)
        local, _ = honest(mine, bos_id, device, [range(mine.shape[1])])
        positions, documents = honest(tokens, bos_id, device, parts, *compiled)
        positions[[i for part in parts for i in part]] = local
        return positions, documents

    with patch.object(training.step, "find_documents", find_documents):
        yield


@contextlib.contextmanager
def nothing_gathered():
    """Plant: a rank's queries see only the keys of that rank."""
    with patch.object(SplitAttention, "__call__", lambda self, q, k, v: Mask()(q, k, v)):
        yield


@contextlib.contextmanager
def targets_counted_once_per_rank():
    """Plant: the loss is a mean over cp ranks."""
    honest = TrainStep.count_targets
    with patch.object(TrainStep, "count_targets", lambda self, t: honest(self, t) * self.cp.size):
        yield


@contextlib.contextmanager
def loss_of_one_rank():
    """Plant: a rank's loss is not summed over cp."""
    honest = TrainStep.sum_over_ranks

    def sum_over_ranks(self, loss):
        with patch.object(self, "mesh", replace(self.mesh, loss=self.mesh.batch)):
            return honest(self, loss)

    with patch.object(TrainStep, "sum_over_ranks", sum_over_ranks):
        yield


@contextlib.contextmanager
def gradients_of_one_chunk():
    """Plant: the gradients of keys and values that come from a rank's low chunk are lost."""
    honest = Gather.backward

    def backward(ctx, *gradients):
        lost = [torch.zeros_like(gradient) for gradient in gradients[:-2]]
        return honest(ctx, *lost, *gradients[-2:])

    with patch.object(Gather, "backward", backward):
        yield


@contextlib.contextmanager
def keys_in_the_order_of_ranks():
    # Plant: gathered keys and values are not put in the order of the sequence.
    with patch.object(parallel.context, "in_order", lambda gathered, ranks: gathered):
        yield


@contextlib.contextmanager
def gradients_in_the_order_of_the_sequence():
    # Plant: the gradients of keys and values are scattered as if ranks' parts were contiguous.
    def sum_in_order(gradients, total, ranks):
        total.zero_()
        for gradient in gradients:
            total[: len(gradient)].add_(gradient)

    with patch.object(parallel.context, "sum_by_rank", sum_in_order):
        yield


@contextlib.contextmanager
def gradients_of_other_heads():
    """Plant: the pieces of the heads change places in backward."""
    honest = BesideEachOther.backward

    def backward(ctx, *placeholders):
        ctx.pieces = ctx.pieces[::-1]
        return honest(ctx, *placeholders)

    with patch.object(BesideEachOther, "backward", backward):
        yield


@contextlib.contextmanager
def other_keys_in_backward():
    """Plant: what backward gathers again is not what forward gathered."""
    honest = Piece.instead_of_keeping

    def instead_of_keeping(self):
        context = honest(self)
        if self.local is not None:
            self.local = self.local * 1.5
        return context

    with patch.object(Piece, "instead_of_keeping", instead_of_keeping):
        yield


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
