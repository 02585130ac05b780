"""costs/ records the model's costs from the code that trains it: operations, memory and
collectives."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from costs.as_on_gpu import DEVICE, AsOnGpu
from costs.collectives import silent_group
from costs.events import Attention, Moved, Product, Sent, Waited, pairs
from costs.recorder import Phase, Recorder
from costs.setting import Setting
from costs.summary import flops_per_token, model_flops
from costs.units import EMBEDDING, HEAD, HIDDEN, CannotRecord, Unit, kind_of, position_bytes, unit
from model.config import ModelConfig
from parallel.collectives import start_all_gather
from parallel.memory import DEFERRED, GRADIENTS, TEMPORARY

SMALL = ModelConfig(dim=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=704,
                    vocab_size=1000)  # fmt: skip
LONG = 512
KINDS = {
    "swiglu": SMALL,
    "normed heads": replace(SMALL, qk_norm=True, attention_dim=512),
    "windows": replace(SMALL, attention="sliding_window", attention_window=100),
    "tied": replace(SMALL, tie_embeddings=True),
}
MODES = ["none", "selective", "full"]
EXPERTS = replace(SMALL, feed_forward="experts", num_experts=8, experts_per_token=2,
                  expert_ffn_dim=128, num_shared_experts=1)  # fmt: skip
BALANCED = replace(EXPERTS, router="sigmoid_bias", router_aux_weight=1e-2, router_z_weight=1e-3,
                   router_bias_rate=1e-3)  # fmt: skip
SETTINGS = [
    Setting(SMALL, LONG),
    Setting(SMALL, LONG, micro_batch_size=2, document_mask=True),
    Setting(SMALL, LONG, tp=4),
    Setting(SMALL, LONG, tp=8, sequence_parallel=False),
    Setting(SMALL, LONG, tp=2, activation_checkpointing="selective"),
    Setting(SMALL, LONG, tp=2, activation_checkpointing="full"),
    Setting(SMALL, LONG, dtype=torch.float32),
    Setting(SMALL, LONG, dtype=torch.float32, document_mask=True),
    *(Setting(model, LONG, tp=2) for model in KINDS.values()),
]
OF_EXPERTS = [
    Setting(EXPERTS, LONG),
    Setting(EXPERTS, LONG, micro_batch_size=3, ep=8, ep_rank=5),
    Setting(EXPERTS, LONG, tp=2, cp=2, ep=4, imbalance=1.5),
    Setting(EXPERTS, LONG, tp=2, ep=2, dtype=torch.float32),
    Setting(BALANCED, LONG, tp=2, cp=2, ep=4),
]
SETTINGS += [replace(each, activation_checkpointing=mode) for each in OF_EXPERTS for mode in MODES]


def units(setting: Setting) -> list[Unit]:
    return [unit(setting, name) for name in (EMBEDDING, kind_of(setting.model, 0), HEAD)]


def block(setting: Setting) -> Unit:
    return units(setting)[1]


# --- operations -----------------------------------------------------------------------------------


def matrices(model: ModelConfig) -> int:
    """The number of parameters in matrix products: all but the embedding and the norms."""
    attention = model.dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    block = attention + 3 * model.dim * model.ffn_dim
    return model.num_layers * block + model.vocab_size * model.dim


ELSEWHERE = replace(SMALL, attention_kernel="flash3")  # which is not installed here


@pytest.mark.parametrize("model", [SMALL, KINDS["normed heads"], KINDS["tied"], ELSEWHERE], ids=str)
def test_flops_of_a_token(model: ModelConfig) -> None:
    """A token takes 6 operations per matrix element (PaLM, appendix B), plus those of attention,
    of whose S × S scores half are counted."""
    attention = 6 * model.num_layers * LONG * model.attention_width
    assert flops_per_token(model, LONG) == 6 * matrices(model) + attention
    assert flops_per_token(model, LONG, whole_attention=True) == 6 * matrices(model) + 2 * attention


def test_a_window_counts_what_it_sees() -> None:
    model = KINDS["windows"]
    seen = pairs(LONG, LONG, model.attention_window - 1, 0) / LONG
    expected = 6 * matrices(model) + 12 * model.num_layers * seen * model.attention_width
    assert flops_per_token(model, LONG) == pytest.approx(expected)
    assert pairs(LONG, LONG, LONG, 0) == LONG**2 / 2
    assert pairs(1000, 1000, 10, 0) == pytest.approx(10_000, rel=0.01)


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_ranks_share_the_operations(tp: int) -> None:
    whole, cut = (units(Setting(SMALL, LONG, tp=size)) for size in (1, tp))
    for one, part in zip(whole, cut, strict=True):
        assert model_flops(part) == model_flops(one) / tp


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_computes_only_what_backward_reads(mode: str, tp: int) -> None:
    """Backward never reads the result of the block's last product, so it is not computed again.
    Selective keeps the products that are whole on each rank. (test_overlap.py has what is sent.)"""
    plain, again = (
        block(Setting(SMALL, LONG, tp=tp, activation_checkpointing=each)) for each in ("none", mode)
    )
    assert model_flops(again) == model_flops(plain)
    columns = 2.0 * LONG * SMALL.dim / tp  # FLOPs of a product per column of its weight
    output, last = columns * SMALL.attention_width, columns * SMALL.ffn_dim
    expected = {
        "full": plain.whole.phases["forward"].product_flops - last,
        "selective": output if tp > 1 else 0.0,  # its result is a partial sum, which is not kept
    }
    before, after = (one.whole.phases["backward"].product_flops for one in (plain, again))
    assert after - before == expected[mode]


# --- context parallelism --------------------------------------------------------------------------


def over_cp_ranks(model: ModelConfig, cp: int, **changes: Any) -> list[Phase]:
    """A block's forward on every cp rank."""
    of_rank = [Setting(model, LONG, cp=cp, cp_rank=rank, **changes) for rank in range(cp)]
    return [block(setting).whole.phases["forward"] for setting in of_rank]


@pytest.mark.parametrize(
    "changes", [{}, {"document_mask": True}, {"dtype": torch.float32}], ids=str
)
@pytest.mark.parametrize("kind", ["swiglu", "windows"])
@pytest.mark.parametrize("cp", [2, 4])
def test_cp_ranks_share_what_one_computes(cp: int, kind: str, changes: dict[str, Any]) -> None:
    """All cp ranks together compute what one rank computes without cp, whichever operator computes
    attention and with a window. Without a window they share it equally. Controls: two chunks of
    queries have more keys than queries, so their scores are not those of two short sequences; and
    contiguous halves would not be equal."""
    model = KINDS[kind]
    alone, *_ = over_cp_ranks(model, 1, **changes)
    ranks = over_cp_ranks(model, cp, **changes)
    scores = [rank.attention_flops() for rank in ranks]
    assert sum(scores) == pytest.approx(alone.attention_flops())
    assert sum(rank.product_flops for rank in ranks) == alone.product_flops
    if kind == "swiglu":
        assert scores == [alone.attention_flops() / cp] * cp
        half = LONG // 2
        assert pairs(half, LONG, LONG, 0) == 3 * pairs(half, half, LONG, 0)


@pytest.mark.parametrize("mode", MODES)
def test_gathered_keys_and_values_are_not_kept(mode: str) -> None:
    """What a block keeps for backward shrinks with cp: it keeps this rank's keys and values, not
    the gathered ones, which are as large as those of cp 1."""
    kept = []
    for cp in (1, 4):
        setting = Setting(SMALL, LONG, cp=cp, activation_checkpointing=mode)
        forward = block(setting).whole.phases["forward"]
        kept.append(sum(forward.effect.changes.values()))
    gathered = 2 * LONG * SMALL.num_kv_heads * SMALL.head_dim * 2
    assert kept[0] / 4 <= kept[1] < kept[0] / 4 + gathered / 2


@pytest.mark.parametrize("document_mask", [False, True])
def test_no_tensor_has_a_score_of_every_query_and_key(
    document_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's block on 131,072 tokens, cp 8: a mask of its queries and their keys would have 2.1e9
    elements. Control: flash attention does not take float32, and the others take such a mask."""
    sizes: list[int] = []
    honest = Recorder.born

    def born(self: Recorder, key: int, size: int, label: Any = None) -> None:
        sizes.append(size)
        honest(self, key, size, label)

    monkeypatch.setattr(Recorder, "born", born)
    of_8b = replace(SMALL, dim=4096, num_heads=32, num_kv_heads=8, ffn_dim=14336)
    long = 2**17
    for dtype in (torch.bfloat16, torch.float32):
        setting = Setting(of_8b, long, cp=8, document_mask=document_mask, dtype=dtype)
        sizes.clear()
        assert block(setting).whole.phases
        assert (max(sizes) >= long * long // 8) == (dtype is torch.float32)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_all_that_stays_are_gradients(setting: Setting, split: bool) -> None:
    """After all phases of a unit, only the gradients of its weights stay in memory, apart from the
    hidden states and their gradients that it exchanges with its neighbours."""
    for one in units(setting):
        record = one.split if split else one.whole
        assert all(phase.effect.height >= 0 for phase in record.phases.values())
        left: Counter[str] = Counter()
        for phase in record.phases.values():
            left.update(phase.effect.changes)
        left = Counter({category: size for category, size in left.items() if size})
        # as CUDA's caching allocator does
        blocks = [-(-w.numel * setting.dtype.itemsize // 512) for w in one.weights]
        assert left.pop(GRADIENTS) == 512 * sum(blocks)
        # The embedding has no hidden input and the head no hidden output.
        if one.name == EMBEDDING:
            assert left == {HIDDEN: one.hidden_bytes, TEMPORARY: -one.hidden_bytes}
        elif one.name == HEAD:
            assert left == {HIDDEN: -one.hidden_bytes, TEMPORARY: one.hidden_bytes}
        else:
            assert left == {}


def test_the_first_of_a_stage_does_not_free_its_input() -> None:
    one = block(Setting(SMALL, LONG))
    free, held = (one.whole.at(first, False)["backward"].effect.changes for first in (False, True))
    assert free[HIDDEN] == -one.hidden_bytes
    assert HIDDEN not in held
    assert {**held, HIDDEN: free[HIDDEN]} == free


def test_deferred_gradients_wait_for_their_phase() -> None:
    record = block(Setting(SMALL, LONG, tp=2)).split
    deferred = [record.phases[name].effect.changes.get(DEFERRED, 0) for name in ("input", "weight")]
    assert deferred[0] > 0
    assert sum(deferred) == 0
    assert record.phases["input"].product_flops == record.phases["weight"].product_flops


def test_positions_are_made_once_for_a_stage() -> None:
    mixed = replace(SMALL, attention=("sliding_window", "causal"), attention_window=100)
    setting = Setting(mixed, LONG)
    kinds = [kind_of(mixed, layer) for layer in (0, 1)]
    one, both = (position_bytes(setting, frozenset(some)) for some in (kinds[1:], kinds))
    # cosines and sines of half a head, float32
    assert one == both == 2 * LONG * mixed.head_dim // 2 * 4


# --- collectives ----------------------------------------------------------------------------------


def test_what_runs_between_a_start_and_its_wait() -> None:
    group = silent_group("tp", 0, 4)
    x, w = (torch.empty(8, 8, device=DEVICE) for _ in range(2))
    recorder = Recorder(lambda piece: None)
    with AsOnGpu(), recorder, recorder.phase("forward"):
        first = start_all_gather(x, group)
        second = start_all_gather(x, group)
        product = x @ w
        second.wait()
        first.wait().sum()
        product.add_(1)
    events = recorder.phases()["forward"].events
    assert [type(event) for event in events] == [Sent, Sent, Product, Waited, Waited, Moved, Moved]
    assert [event.number for event in events[:2]] == [0, 1]
    assert [event.number for event in events[3:5]] == [1, 0]
    assert events[0].call.bytes == 4 * x.nbytes
    assert events[2].flops == 2 * 8**3


def record_in_a_job() -> float:
    """One rank records and the other does not; then they communicate."""
    found = 0.0
    if dist.get_rank() == 0:
        found += flops_per_token.__wrapped__(SMALL, LONG)
        with torch.no_grad():
            found += flops_per_token.__wrapped__(SMALL, 2 * LONG)
    total = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def test_a_running_job_may_record(ranks) -> None:
    expected = flops_per_token(SMALL, LONG) + flops_per_token(SMALL, 2 * LONG)
    assert ranks.run(record_in_a_job, 2) == [expected, expected]


def test_attention_is_one_operation_with_grouped_heads() -> None:
    found = [event for event in block(Setting(SMALL, LONG)).whole.phases["backward"].events
             if isinstance(event, Attention)]  # fmt: skip
    forward = 4 * SMALL.num_heads * LONG**2 * SMALL.head_dim
    assert [(each.flops, each.whole_flops) for each in found] == [(1.25 * forward, 2.5 * forward)]


def test_a_layer_that_asks_for_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self, x):
        return x * x.sum().item()

    monkeypatch.setattr("model.feed_forward.swiglu.FeedForward.forward", forward)
    unit.cache_clear()
    with pytest.raises(CannotRecord, match=r"'causal swiglu': does not run on .*Tensor.item"):
        _ = unit(Setting(SMALL, LONG), "causal swiglu").whole
    unit.cache_clear()


def test_torch_s_own_attention_is_recorded() -> None:
    """torch's own attention is recorded with every kind of mask, and also where values are narrower
    than keys."""
    q, k = (torch.empty(2, heads, 16, 8, device=DEVICE) for heads in (4, 2))
    narrow = torch.empty(2, 2, 16, 4, device=DEVICE)
    attend = torch.nn.functional.scaled_dot_product_attention
    recorder = Recorder(lambda piece: None)
    with AsOnGpu(), recorder, recorder.phase("forward"):
        shapes = [
            attend(q, k, k, is_causal=True, enable_gqa=True).shape,
            attend(q, k, narrow, is_causal=True, enable_gqa=True).shape,
            attend(q, k, k, torch.empty(16, 16, device=DEVICE), enable_gqa=True).shape,
        ]
    assert shapes == [(2, 4, 16, 8), (2, 4, 16, 4), (2, 4, 16, 8)]
    events = recorder.phases()["forward"].events
    found = [event.whole_flops for event in events if isinstance(event, Attention)]
    assert found == [2 * 4 * 16 * 16 * 2 * width for width in (16, 12, 16)]
    assert attend(*(torch.ones(1, 1, 2, 2) for _ in range(3))).shape == (1, 1, 2, 2)
