"""Controls for context parallelism: each entry of a table plants a known fault of such code in the
ranks, and the comparison with the unsharded model must report it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import model.positions
import parallel.context
import training.step
from model.mask import Mask
from parallel.context import KeysAndValues, SplitAttention
from proofs.parity.run import check
from tests.planted import gradients_averaged, name_of, planting, replicas_counted_in_the_norm
from tests.proofs.context_batches import CP2, check_batch, other_keys_in_backward
from tests.proofs.parity_tiers import is_found
from tokens import IGNORE
from training.step import TrainStep


def labels_shifted_after_the_cut(microbatches, *rows, **settings):
    """A token's target is the next token of the rank's part: another one where a chunk ends."""

    def local(one):
        shifted = torch.cat((one.tokens[1:], one.targets[-1:]))
        return replace(one, targets=torch.where(one.targets == IGNORE, IGNORE, shifted))

    return [local(one) for one in microbatches(*rows, **settings)]


def documents_found_after_the_cut(find_documents, tokens, bos_id, device, parts, *compiled):
    """Each rank finds the documents of its own tokens, as if its part were a sequence."""
    mine = torch.cat([tokens[:, part] for part in map(list, parts)], dim=1)
    local, _ = find_documents(mine, bos_id, device, [range(mine.shape[1])])
    positions, documents = find_documents(tokens, bos_id, device, parts, *compiled)
    positions[[i for part in parts for i in part]] = local
    return positions, documents


def loss_of_one_rank(sum_over_ranks, self, loss):
    """A rank's loss is not summed over cp."""
    with patch.object(self, "mesh", replace(self.mesh, loss=self.mesh.batch)):
        return sum_over_ranks(self, loss)


def gradients_of_one_chunk(start_gradients, self, *gradients):
    """The gradients of keys and values that come from a rank's low chunk are lost."""
    lost = [torch.zeros_like(gradient) for gradient in gradients[:-2]]
    start_gradients(self, *lost, *gradients[-2:])


def gradients_in_the_order_of_the_sequence(_, gradients, total, ranks):
    """The gradients of keys and values are scattered as if ranks' parts were contiguous."""
    total.zero_()
    for gradient in gradients:
        total[: len(gradient)].add_(gradient)


LOSS, NORM = {"gradient", "loss", "norm"}, {"gradient", "norm"}
# What takes the place of which method (it gets the original as its first argument); and in which
# quantities the comparison must report it.
MISTAKES = {
    "labels shifted after the cut":
        (TrainStep, "microbatches", labels_shifted_after_the_cut, LOSS),
    "each rank counts the positions of its own tokens from 0":
        (model.positions, "rotary_angles", lambda rotary_angles, positions, *arguments:
         rotary_angles(torch.arange(len(positions)).unsqueeze(1), *arguments), LOSS),
    # as torch's `is_causal` does
    "query i of a chunk sees keys 0 to i":
        (model.positions, "make_mask", lambda *_: Mask(), LOSS),
    "documents found after the cut":
        (training.step, "find_documents", documents_found_after_the_cut, LOSS),
    "a rank's queries see only the keys of that rank":
        (SplitAttention, "__call__", lambda _, self, q, k, v: Mask()(q, k, v), LOSS),
    "the loss is a mean over cp ranks":
        (TrainStep, "count_targets", lambda count_targets, self, targets:
         count_targets(self, targets) * self.cp.size, LOSS),
    "loss of one rank": (TrainStep, "sum_over_ranks", loss_of_one_rank, {"loss", "spread"}),
    "gradients of one chunk": (KeysAndValues, "start_gradients", gradients_of_one_chunk, NORM),
    "gathered keys and values are not put in the order of the sequence":
        (parallel.context, "in_order", lambda _, gathered, ranks: gathered, LOSS),
    "gradients in the order of the sequence":
        (parallel.context, "sum_by_rank", gradients_in_the_order_of_the_sequence, NORM),
    "the pieces of the heads change places in backward":
        (parallel.context, "join_gradients", lambda join_gradients, pieces, *about:
         join_gradients(pieces[::-1], *about), NORM),
}  # fmt: skip


@pytest.mark.parametrize(
    ("bug", "case", "where"),
    [
        *((name, replace(CP2, document_mask="documents" in name), where)
          for name, (_, _, _, where) in MISTAKES.items()),
        (gradients_averaged, CP2, NORM),
        # with zero_stage 0 every cp rank holds all weights
        (replicas_counted_in_the_norm, replace(CP2, zero_stage=0), {"norm"}),
    ],
    ids=name_of,
)  # fmt: skip
def test_planted_bug_is_found(ranks, bug, case, where):
    row = check(ranks, case, sabotage=planting(bug, __name__))
    is_found(row, where)
    assert "weights" not in row.failures()


@pytest.mark.parametrize(
    ("bug", "case", "rows", "where"),
    [
        ("documents found after the cut", replace(CP2, document_mask=True), 2, LOSS),
        (other_keys_in_backward, CP2, 1, NORM),
        (other_keys_in_backward, replace(CP2, num_kv_heads=8), 1, NORM),
    ],
    ids=name_of,
)
def test_planted_bug_is_found_in_the_batch_of_documents(ranks, bug, case, rows, where):
    is_found(check_batch(ranks, case, rows, "all", planting(bug, __name__)), where)
