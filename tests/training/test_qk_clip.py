"""QK-clip limits the attention logits of every head, by the largest of the whole batch."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from errors import UserError
from kinds import kinds_in
from model import largest_logits
from model.attention import BaseAttention, causal, sliding_window
from model.mask import Mask
from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from proofs.parity.reference import keys_to_try
from proofs.parity.run import check
from settings.checks import validate
from tests import runs
from tests.planted import name_of, nothing_wrong, planted
from tests.proofs.parity_tiers import agrees, is_found, thorough_but
from tests.steps import make_step, rows_of
from training import qk_clip
from training.guard import UpdateGuard
from training.qk_clip import QKClip, Rows

# Cases with Muon have limits that some heads exceed, in every second step (proofs/parity/cases.py).
# The parity proof's window of 5 hides too little: `of_no_window` would not be found with it.
WINDOWS = {
    "attention": ("sliding_window", "causal"),
    "keys": (("sliding_window", sliding_window.Settings(window=3)),),
}
SHARED = Case(MeshSizes(dp_shard=2), optimizer="muon")
OWN = Case(MeshSizes(cp=2, tp=2), optimizer="muon", num_kv_heads=8, document_mask=True, **WINDOWS)
QUICK = [replace(OWN, activation_checkpointing="full")]
CASES = [
    *QUICK,
    replace(OWN, layout=MeshSizes(dp_replicate=2, cp=2), offload="disk", num_microbatches=8),
    replace(SHARED, layout=MeshSizes(pp=2, tp=2), layers="none_first", schedule="zb_h1"),
    replace(SHARED, layout=MeshSizes(tp=4), num_kv_heads=2, activation_checkpointing="selective"),
]


@pytest.mark.parametrize("case", thorough_but(QUICK, CASES), ids=str)
def test_the_steps_are_those_of_one_device(ranks, case):
    agrees(ranks, case, 5)


def of_own_tokens():
    """Each rank limits the logits of its own tokens."""
    alone = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=dist.ReduceOp)
    return patch.object(qk_clip, "dist", alone)


@planted(largest_logits, "measure")
def of_no_window(measure, mask, q, k):
    """Also of keys that a query does not see."""
    return measure(replace(mask, window=None), q, k)


@planted(Rows, "of")
def by_halves(of, *about):
    """As if every head had its own keys."""
    *others, of_head = about
    return of(*others, [(count, 0.5) for count, _ in of_head])


@planted(QKClip, "begin")
def always(begin, self, step):
    """In every step."""
    begin(self, 0)


@pytest.mark.parametrize(
    ("case", "mistake"),
    [(SHARED, of_own_tokens), (OWN, of_no_window), (SHARED, by_halves), (SHARED, always)],
    ids=name_of,
)
def test_other_limits_are_noticed(ranks, case, mistake):
    """Control."""
    is_found(check(ranks, case, 5, mistake), {"loss_steps", "norm_steps", "updated"})


@pytest.mark.parametrize("memory", [1, 400, 1 << 30], ids=["a row", "some rows", "all rows"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("begins", [{0}, {0, 5, 8}], ids=["one document", "documents"])
def test_the_largest_logits_of_a_chunk(begins, window, memory, monkeypatch):
    """Of queries 4 to 9 of a sequence, by parts of the queries."""
    monkeypatch.setattr(largest_logits, "LOGITS_BYTES", memory)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 1, 4, 8, generator=generator)
    k = torch.randn(10, 1, 2, 8, generator=generator)
    where = torch.tensor([[at - max(b for b in begins if b <= at)] for at in range(4, 10)])
    packed = len(begins) > 1 or None
    mask = Mask(False, packed, window, positions=where, first=4)
    found = largest_logits.measure(mask, q, k)
    expected = torch.full((4,), -torch.inf)
    for head, at in itertools.product(range(4), range(4, 10)):
        begin = max(max(b for b in begins if b <= at), at + 1 - (window or 10))
        seen = k[begin : at + 1, 0, head // 2] @ q[at - 4, 0, head] / 8**0.5
        expected[head] = max(expected[head], seen.max())
    torch.testing.assert_close(found, expected)


def test_large_logits_are_found_in_float16():
    x = torch.full((4, 1, 1, 64), 40.0, dtype=torch.float16)
    mask = Mask(positions=torch.arange(4).unsqueeze(1))
    assert largest_logits.measure(mask, x, x) == 12800


def largest_logit(case, plant=nothing_wrong):
    with plant():
        step = make_step(case)
        return step(0, *rows_of(step)).largest_logit.item()


def test_no_kind_of_attention_is_forgotten(ranks):
    for kind in kinds_in("model.attention"):
        keys = keys_to_try("attention", kind)
        case = Case(MeshSizes(), attention=kind, keys=keys, optimizer="muon")
        assert math.isfinite(ranks.run(largest_logit, 1, case)[0])


def test_the_largest_logit_is_that_of_the_whole_model(ranks):
    (alone,) = ranks.run(largest_logit, 1, replace(SHARED, layout=MeshSizes()))
    for layout in (MeshSizes(tp=2), MeshSizes(cp=2)):
        found = ranks.run(largest_logit, 2, replace(SHARED, layout=layout))
        assert found == pytest.approx([alone] * 2, rel=1e-11)
    first, second = ranks.run(largest_logit, 2, replace(SHARED, layout=MeshSizes(pp=2)))
    assert first == second, "although stages have other layers"


@planted(causal.Attention, "watched")
def unwatched(watched, self, attend):
    return attend


def test_a_kind_that_notes_nothing_is_noticed(ranks):
    with runs.dies("watched"):
        ranks.run(largest_logit, 1, Case(MeshSizes(), optimizer="muon"), unwatched)


@planted(UpdateGuard, "__call__")
def skipped(guard, self, loss, norm):
    return torch.full_like(guard(self, loss, norm), math.inf)


@planted(UpdateGuard, "__call__")
def skipped_by_nan(guard, self, loss, norm):
    return torch.full_like(guard(self, loss, norm), math.nan)


def held_after(case, *plants):
    """Weights and Muon's states after a step for each of these, in the second of which some heads
    are above the limit."""
    step = make_step(case)
    for number, plant in enumerate(plants, start=1):
        with plant():
            largest = step(number, *rows_of(step)).largest_logit
    assert len(plants) == 1 or largest > step.qk_clip.limit
    tensors = [t for states in step.optimizer.states for t in states.values()]
    return [t.clone() for t in (*tensors, *(each.sharded.to_local() for each in step.weights))]


def test_a_skipped_step_updates_and_limits_nothing(ranks):
    """With a control: a step that is not skipped changes every weight and state."""
    before = ranks.run(held_after, 2, SHARED, nothing_wrong)
    for plant in (skipped, skipped_by_nan, nothing_wrong):
        after = ranks.run(held_after, 2, SHARED, nothing_wrong, plant)
        for one, other in zip(before, after, strict=True):
            assert set(map(torch.equal, one, other)) == {plant is not nothing_wrong}


def test_rows_are_multiplied_by_their_powers():
    """Rows 9 to 16 of a weight with four rows a head, on a rank whose first head is 2. As in
    DeepSeek's latent attention: √γ for a head's own rows, γ for queries of keys that heads share, 1
    for values."""
    part = torch.ones(8, 2)
    rows = Rows.of(part, range(9, 17), 2, [(1, 0.5), (2, 1.0), (1, 0.0)])
    rows.scale(torch.tensor([0.25, 4.0, 0.0625]))
    assert part.tolist() == [[x, x] for x in (0.25, 0.25, 1, 2, 4, 4, 1, 0.25)]


def refused(config):
    with pytest.raises(UserError) as error:
        validate(config, 1)
    return error.value.key


def test_what_cannot_be_limited_is_refused(monkeypatch):
    config = Case(MeshSizes(), optimizer="muon").config()
    validate(config, 1)
    assert refused(replace(config, model=replace(config.model, qk_norm=True))) == "model.qk_norm"
    monkeypatch.setattr(causal.Attention, "rows_of_heads", BaseAttention.rows_of_heads)
    assert refused(config) == "optimizer.muon.qk_clip"
