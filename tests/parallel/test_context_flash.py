"""Flash attention's bookkeeping for the chunks of context parallelism: where documents begin among
a chunk's queries, and where among the keys that they see."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, wraps
from itertools import pairwise, product

import pytest
import torch

import training.step
from model.documents import find_documents
from model.mask import Mask, make_mask, scores_bias
from parallel.axes import MeshSizes
from parallel.context import ContextParallel, Piece
from proofs.parity.cases import BOS, SEQ_LEN, Case
from proofs.parity.run import check, run_on_ranks
from proofs.ranks import Ranks
from tests.counting import gathers, once, sent_over_cp
from tests.kernels.flash import flash_attention_stands_in
from tests.planted import name_of, planted
from tests.proofs.context_batches import (
    DOCUMENTS,
    WINDOW,
    check_batch,
    given,
    other_keys_in_backward,
    with_rows,
)
from tests.proofs.parity_tiers import agrees, thorough_but
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


@pytest.mark.parametrize("numbers", ROWS, ids=str)
def test_the_documents_of_a_part(numbers):
    """By the definition, token by token: the documents with tokens in the part, each with the keys
    from its begin, which may lie before the part, to its end, or the part's."""
    tokens = rows_of(*numbers)
    positions, found = find_documents(tokens, BOS, "cpu", list(PARTS.values()))
    for part, documents in zip(PARTS.values(), found, strict=True):
        of_q, of_k, first = [], [], []
        for number in numbers:
            begins = [0, *DOCUMENTS[number]]
            mine = [
                range(begin, min(end, part.stop))
                for begin, end in pairwise([*begins, SEQ_LEN])
                if begin < part.stop and end > part.start
            ]
            of_q += [len(range(max(each.start, part.start), each.stop)) for each in mine]
            of_k += [len(each) for each in mine]
            first.append(mine[0].start)
        assert documents.queries.diff().tolist() == of_q
        assert documents.keys.diff().tolist() == of_k
        assert documents.queries[0] == documents.keys[0] == 0
        assert documents.first_keys == tuple(first)
    assert positions.shape == tokens.T.shape


LONG = [name for name, part in PARTS.items() if len(part) > 1]


@pytest.mark.parametrize(
    ("part", "seen"),
    # of parts of one token (cp 8), every window is tried in the second tier
    thorough_but(
        [*product(LONG, (None, 5, 3, 1)), *product(PARTS, (3,))], product(PARTS, (None, 5, 3, 1))
    ),
)
def test_a_chunk_s_mask_by_boundaries_and_by_bias(part, seen):
    """Outputs and gradients from document boundaries equal those from an additive mask, for one and
    two sequences, for documents of every kind and for none, and for every number of key/value
    heads."""
    part = PARTS[part]
    without = set()  # numbers of sequences and key/value heads that were tried without documents
    with flash_attention_stands_in():
        for numbers in ROWS:
            tokens = rows_of(*numbers)
            positions, (documents,) = find_documents(tokens, BOS, "cpu", [part])
            whole = torch.arange(SEQ_LEN).unsqueeze(1)
            cases = [(positions, documents)]
            if (size := (len(numbers), kv_heads_of(*numbers))) not in without:
                without.add(size)
                cases.append((whole, None))
            for where, found in cases:
                where = where[part.start : part.stop]
                mask = make_mask(where, found, seen, torch.float64, 8, "auto", part)
                bias = scores_bias(where, torch.float64, seen, part.start)
                compare_masks(mask, Mask(bias=bias), part, *numbers)


def kv_heads_of(*numbers):
    return (4, 2, 1)[sum(numbers) % 3]


def compare_masks(mask, other, part, *numbers):
    torch.manual_seed(0)
    kv_heads = kv_heads_of(*numbers)
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


# --- the model ------------------------------------------------------------------------------------

DOCUMENTS_OF_2 = Case(MeshSizes(cp=2), document_mask=True, num_microbatches=16)


@pytest.mark.parametrize("checkpointing", thorough_but({"full"}, ["none", "selective", "full"]))
@pytest.mark.parametrize(
    "case",
    [
        DOCUMENTS_OF_2,
        # without documents, chunks are packed, but for the first
        pytest.param(Case(MeshSizes(cp=2), num_microbatches=32), marks=pytest.mark.thorough),
        pytest.param(
            Case(MeshSizes(cp=4), document_mask=True, num_microbatches=32, **WINDOW),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_the_model_by_boundaries(ranks, case, checkpointing):
    case = replace(case, activation_checkpointing=checkpointing)
    row = check_batch(ranks, case, "all", flash_attention_stands_in)
    assert not row.failures(), str(row)


@pytest.fixture(scope="module")
def strict() -> Iterator[Ranks]:
    with Ranks(2, timeout=60, backend="strict") as pool:
        yield pool


ROWS_OF_RANKS = pytest.mark.parametrize(
    "rows", thorough_but([2], [1, 2]), ids="{} per micro-batch".format
)


OPTIONS = ({}, WINDOW, {"document_mask": True})


@pytest.mark.parametrize(
    ("rows", "options"),
    thorough_but([(1, OPTIONS[2])], product((1, 2), OPTIONS)),
    ids=str,
)
def test_all_ranks_gather_alike(strict, rows, options):
    """Some chunks are packed and others are not, so ranks run different kernels, and these keep
    views of gathered keys, or copies. Still all ranks gather at the same places."""
    case = with_rows(Case(MeshSizes(cp=2), **options), rows)
    agrees(strict, case, sabotage=flash_attention_stands_in)


@planted(Piece, "instead_of_keeping")
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


@planted(Piece, "instead_of_keeping")
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
def test_a_rank_that_decides_alone_is_found(strict, bug, rows):
    """Without documents, rank 0's first chunk is not packed: its kernel keeps views where those of
    rank 1 keep copies of two sequences."""
    case = with_rows(Case(MeshSizes(cp=2)), rows)
    found = check(strict, case, sabotage=partial(with_flash, bug)).crash
    assert "different collectives" in found or "deadlock" in found, found


def sent_with_flash(case):
    with flash_attention_stands_in():
        return sent_over_cp(case, True)


@ROWS_OF_RANKS
def test_flash_gathers_as_often(ranks, rows):
    """One sequence is gathered again. Two are packed into copies, which are kept."""
    case = with_rows(Case(MeshSizes(dp_shard=2, cp=2), document_mask=True), rows)
    number, size = once(case, 4, itemsize=8)
    times = gathers(case)
    assert times == 3 - rows
    for sent in ranks.run(sent_with_flash, 4, case):
        assert sent == {"all_gather": (times * number, times * size),
                        "reduce_scatter": (number, size)}  # fmt: skip


def documents_changed(change):
    """Decorate a mistake: boundaries reach the kernel as change(documents, part)."""

    @planted(training.step, "find_documents")
    @wraps(change)
    def find(honest, tokens, bos_id, device, parts, *compiled):
        positions, found = honest(tokens, bos_id, device, parts, *compiled)
        return positions, [change(d, part) for d, part in zip(found, parts, strict=True)]

    return find


@documents_changed
def boundaries_divided_by_cp(d, _):
    return d._replace(queries=d.queries // 2, keys=d.keys // 2)


@documents_changed
def documents_begin_in_the_chunk(d, part):
    """A chunk's first document begins with the chunk."""
    return d._replace(keys=d.queries, first_keys=(part.start,) * len(d.first_keys))


@documents_changed
def boundaries_of_one_document(d, _):
    """All documents of a chunk are one."""
    return d._replace(queries=d.queries[[0, -1]], keys=d.keys[[0, -1]])


@pytest.mark.parametrize(
    ("bug", "where"),
    [
        (documents_begin_in_the_chunk, {"gradient", "loss"}),
        (boundaries_of_one_document, {"gradient", "loss"}),
        (other_keys_in_backward, {"gradient"}),
    ],
    ids=name_of,
)
def test_planted_bug_is_found(ranks, bug, where):
    """Also the last one, with one sequence per micro-batch: backward gathers keys again."""
    case = with_rows(DOCUMENTS_OF_2, 1)
    row = check_batch(ranks, case, "all", partial(with_flash, bug))
    assert where <= set(row.failures()), str(row)


def run_refused(case):
    bug = partial(with_flash, boundaries_divided_by_cp)
    return said_by(run_on_ranks, case, 0, partial(given, "all", bug))


def test_boundaries_divided_by_cp_are_found(ranks):
    """The pretended kernel refuses them."""
    for said in ranks.run(run_refused, 2, DOCUMENTS_OF_2):
        assert "Error" in said
