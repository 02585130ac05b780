"""Flash attention's bookkeeping for the chunks of context parallelism: where documents begin among
a chunk's queries, and where among the keys that they see."""

import contextlib
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch

import training.step
from model.documents import find_documents
from model.mask import Mask, make_mask, scores_bias
from parallel.axes import MeshSizes
from parallel.context import ContextParallel, KeysAndValues
from proofs.parity.cases import BOS, SEQ_LEN, Case
from proofs.parity.chosen import WINDOW
from proofs.parity.run import run_on_ranks
from tests.kernels.flash import flash_attention_stands_in
from tests.planted import name_of, planted
from tests.proofs.context_batches import CP2, DOCUMENTS, check_batch, given, other_keys_in_backward
from tests.proofs.parity_tiers import is_found, strictly, thorough_but
from tests.runs import said_by

PARTS = {  # of all ranks of cp 2, 4 and 8, and the whole sequence
    f"{part.start}-{part.stop}": part
    for size in (1, 2, 4, 8)
    for rank in range(size)
    for part in ContextParallel(size, rank).chunks(SEQ_LEN)
}


def rows_of(*numbers):
    """Tokens [B, S] with the documents of these numbers."""
    tokens = torch.full((len(numbers), SEQ_LEN), BOS + 1)
    for row, number in zip(tokens, numbers, strict=True):
        row[DOCUMENTS[number]] = BOS
    return tokens


# one sequence with each kind of documents, and two with any two kinds that follow each other
ROWS = [(i,) for i in range(len(DOCUMENTS))] + [(i, i - 1) for i in range(len(DOCUMENTS))]


@pytest.mark.parametrize("part", PARTS)
def test_a_chunk_s_mask_by_boundaries_and_by_bias(part):
    """Outputs and gradients from document boundaries equal those from an additive mask, with and
    without a window, for one and two sequences, for documents of every kind and for none, and for
    every number of key/value heads."""
    part = PARTS[part]
    whole = torch.arange(SEQ_LEN).unsqueeze(1)
    with flash_attention_stands_in():
        # five windows, so that each kind of documents meets two of them
        for numbers, seen in zip(ROWS, cycle((None, 5, 3, 1, 3)), strict=False):
            positions, (documents,) = find_documents(rows_of(*numbers), BOS, "cpu", [part])
            for where, found in ((positions, documents), (whole, None)):
                where = where[part.start : part.stop]
                mask = make_mask(where, found, seen, torch.float64, 8, "auto", part)
                bias = scores_bias(where, torch.float64, seen, part.start)
                compare_masks(mask, Mask(bias=bias), part, *numbers)


def compare_masks(mask, other, part, *numbers):
    torch.manual_seed(0)
    kv_heads = (4, 2, 1)[sum(numbers) % 3]
    q, k, v = (
        torch.randn(length, len(numbers), heads, 8, dtype=torch.float64, requires_grad=True)
        for length, heads in ((len(part), 4), (part.stop, kv_heads), (part.stop, kv_heads))
    )
    weights = torch.randn(q.shape, dtype=torch.float64)
    found = []
    for each in (mask, other):
        y = each(q, k, v)
        found.append((y, *torch.autograd.grad((y * weights).sum(), (q, k, v))))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-12


PACKED = replace(CP2, document_mask=True)
CP4 = Case(MeshSizes(cp=4), document_mask=True, **WINDOW)
MODELS = [  # without documents, chunks are packed, but for the first
    *product((CP2, replace(CP2, **WINDOW), PACKED), (1, 2)),
    (CP4, 1),
    *(
        (replace(case, activation_checkpointing=mode), rows)
        for case, rows in ((PACKED, 2), (CP2, 1))
        for mode in ("full", "selective")
    ),
]
QUICK = [(replace(PACKED, activation_checkpointing="full"), 2), (PACKED, 1)]


@pytest.mark.parametrize(("case", "rows"), thorough_but(QUICK, MODELS), ids=str)
def test_the_model_by_boundaries(ranks, case, rows):
    """Some chunks are packed and others are not, so ranks run different kernels, and these keep
    views of gathered keys, or copies. Still all ranks gather at the same places."""
    with strictly(ranks):
        row = check_batch(ranks, case, rows, "all", flash_attention_stands_in)
    assert not row.failures(), str(row)


@planted(KeysAndValues, "instead_of_keeping")
@contextlib.contextmanager
def each_rank_decides_by_its_kernels(_, self):
    """A rank gathers again when, and only if, autograd asks for a view."""
    storage = self._whole.untyped_storage()._cdata
    self.drop()

    def pack(x):
        mine = x.untyped_storage()._cdata == storage
        return (x.shape, x.stride(), x.storage_offset()) if mine else x

    def unpack(kept):
        return self.whole().as_strided(*kept) if isinstance(kept, tuple) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield False


@planted(KeysAndValues, "instead_of_keeping")
def one_rank_keeps(instead_of_keeping, self):
    """Rank 1 keeps what it has gathered."""
    self.cp = replace(self.cp, gathers_again=self.cp.gathers_again and self.cp.rank == 0)
    return instead_of_keeping(self)


@contextlib.contextmanager
def with_flash(bug):
    with flash_attention_stands_in(), bug():
        yield


@pytest.mark.parametrize(
    ("bug", "rows"), [(each_rank_decides_by_its_kernels, 2), (one_rank_keeps, 1)], ids=name_of
)
def test_a_rank_that_decides_alone_is_found(ranks, bug, rows):
    """Without documents, rank 0's first chunk is not packed: its kernel keeps views where those of
    rank 1 keep copies of two sequences."""
    with strictly(ranks):
        found = check_batch(ranks, CP2, rows, "all", partial(with_flash, bug)).crash
    assert "different collectives" in found or "deadlock" in found, found


# how boundaries reach the kernel
CHANGES = {
    "boundaries divided by cp":
        lambda d, part: d._replace(queries=d.queries // 2, keys=d.keys // 2),
    "a chunk's first document begins with the chunk":
        lambda d, part: d._replace(keys=d.queries, first_keys=(part.start,) * len(d.first_keys)),
    "all documents of a chunk are one":
        lambda d, part: d._replace(queries=d.queries[[0, -1]], keys=d.keys[[0, -1]]),
}  # fmt: skip


@contextlib.contextmanager
def changed(name):
    @planted(training.step, "find_documents")
    def find(honest, tokens, bos_id, device, parts, *compiled):
        positions, found = honest(tokens, bos_id, device, parts, *compiled)
        return positions, [CHANGES[name](d, part) for d, part in zip(found, parts, strict=True)]

    with flash_attention_stands_in(), find():
        yield


@pytest.mark.parametrize(
    "bug",
    [
        "a chunk's first document begins with the chunk",
        "all documents of a chunk are one",
        other_keys_in_backward,
    ],
    ids=name_of,
)
def test_planted_bug_is_found(ranks, bug):
    """Also the last one, with one sequence per micro-batch: backward gathers keys again."""
    of_kernel = isinstance(bug, str)
    plant = partial(changed, bug) if of_kernel else partial(with_flash, bug)
    row = check_batch(ranks, PACKED, 1, "all", plant)
    is_found(row, {"gradient", "loss"} if of_kernel else {"gradient"})


def run_refused(case):
    bug = partial(changed, "boundaries divided by cp")
    return said_by(run_on_ranks, case, 1, partial(given, "all", bug))


def test_boundaries_divided_by_cp_are_found(ranks):
    """The pretended kernel refuses them."""
    for said in ranks.run(run_refused, 2, PACKED):
        assert "AssertionError" in said
