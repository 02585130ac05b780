"""costs/ records the model's costs from the code that trains it: operations, memory and
collectives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from costs.as_on_gpu import DEVICE, AsOnGpu
from costs.events import Attention, Moved, event_of, pairs
from costs.recorder import Recorder
from costs.setting import Setting
from costs.summary import flops_per_token, model_flops
from costs.units import EMBEDDING, HEAD, CannotRecord, Unit, kind_of, unit
from model.attention import sliding_window
from model.config import ModelConfig

SMALL = ModelConfig(dim=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=704,
                    vocab_size=1000)  # fmt: skip
LONG = 512
KINDS = {
    "swiglu": SMALL,
    "normed heads": replace(SMALL, qk_norm=True, attention_dim=512),
    "windows": replace(SMALL, attention="sliding_window", sliding_window={"window": 100}),
    "tied": replace(SMALL, tie_embeddings=True),
    "a kernel that is not installed": replace(SMALL, attention_kernel="flash3"),
}


def units(setting: Setting) -> list[Unit]:
    return [unit(setting, name) for name in (EMBEDDING, kind_of(setting.model, 0), HEAD)]


def block(setting: Setting) -> Unit:
    return units(setting)[1]


def matrices(model: ModelConfig) -> int:
    """The number of parameters in matrix products: all but the embedding and the norms."""
    attention = model.dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    block = attention + 3 * model.dim * model.ffn_dim
    return model.num_layers * block + model.vocab_size * model.dim


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "windows"])
def test_flops_of_a_token(kind: str) -> None:
    """A token takes 6 operations per matrix element (PaLM, appendix B), plus those of attention,
    of whose S × S scores half are counted."""
    model = KINDS[kind]
    attention = 6 * model.num_layers * LONG * model.attention_width
    assert flops_per_token(model, LONG) == 6 * matrices(model) + attention
    assert flops_per_token(model, LONG, whole_attention=True) == 6 * matrices(model) + 2 * attention


def test_a_window_counts_what_it_sees() -> None:
    model = KINDS["windows"]
    seen = pairs(LONG, LONG, model.of(sliding_window.Settings).window - 1, 0) / LONG
    expected = 6 * matrices(model) + 12 * model.num_layers * seen * model.attention_width
    assert flops_per_token(model, LONG) == pytest.approx(expected)
    assert pairs(LONG, LONG, LONG, 0) == LONG**2 / 2
    assert pairs(1000, 1000, 10, 0) == pytest.approx(10_000, rel=0.01)


@pytest.mark.parametrize("kind", ["swiglu", "windows"])
def test_packed_documents_count_what_they_see(kind: str) -> None:
    """As sequences of their length do; a document need not be longer than the window."""
    for length in (64, LONG):
        alone = flops_per_token(KINDS[kind], length)
        assert flops_per_token(KINDS[kind], LONG, document=length) == pytest.approx(alone)


def test_a_block_does_not_count_what_is_done_once_for_all_blocks() -> None:
    """It begins with the norm of its input, which is read and written: not with the angles."""
    forward = block(Setting(SMALL, LONG)).phases()["forward"].events
    assert isinstance(forward[0], Moved)
    assert forward[0].bytes > 2 * LONG * SMALL.dim * 2


def test_tp_ranks_share_the_operations() -> None:
    whole, cut = (units(Setting(SMALL, LONG, tp=size)) for size in (1, 4))
    for one, part in zip(whole, cut, strict=True):
        assert model_flops(part) == model_flops(one) / 4


@pytest.mark.parametrize(
    ("name", "others", "passes"),
    [("add.Tensor", 1, 3), ("add_.Tensor", 1, 3), ("copy_.default", 1, 2),
     ("addmm_.default", 2, 4), ("addmm_.default beta", 2, 3)],
)  # fmt: skip
def test_what_is_changed_in_place_is_read_and_written(name: str, others: int, passes: int) -> None:
    """Bytes, in tensors. What is overwritten is not read."""
    name, *zero = name.split()
    packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    arguments, named = [torch.ones(4, 4) for _ in range(1 + others)], dict.fromkeys(zero, 0)
    event = event_of(operator, arguments, named, operator(*arguments, **named))
    assert event.bytes == passes * arguments[0].nbytes  # type: ignore[union-attr]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mode", ["full", "full_but_attention", "selective"])
def test_recomputation_computes_only_what_backward_reads(mode: str, tp: int) -> None:
    """Backward never reads the result of the block's last product, so it is not computed again.
    Selective keeps the products that are whole on each rank. (test_overlap.py has what is sent.)"""
    plain, again = (
        block(Setting(SMALL, LONG, tp=tp, activation_checkpointing=each)) for each in ("none", mode)
    )
    assert model_flops(again) == model_flops(plain)
    columns = 2.0 * LONG * SMALL.dim / tp  # FLOPs of a product per column of its weight
    output, last = columns * SMALL.attention_width, columns * SMALL.ffn_dim
    forward = plain.phases()["forward"]
    expected = {
        "full": forward.product_flops - last,
        "full_but_attention": forward.product_flops - last,
        "selective": output if tp > 1 else 0.0,  # its result is a partial sum, which is not kept
    }
    before, after = (one.phases()["backward"] for one in (plain, again))
    assert after.product_flops - before.product_flops == expected[mode]
    attention = forward.attention_flops() if mode == "full" else 0.0
    assert after.attention_flops() - before.attention_flops() == attention


@pytest.mark.parametrize(
    "changes", [{}, {"document_mask": True}, {"dtype": torch.float32}], ids=str
)
@pytest.mark.parametrize("kind", ["swiglu", "windows"])
def test_cp_ranks_share_what_one_computes(kind: str, changes: dict[str, Any]) -> None:
    """All cp ranks together compute what one rank computes without cp, whichever operator computes
    attention and with a window. Without a window they share it equally. Controls: two chunks of
    queries have more keys than queries, so their scores are not those of two short sequences; and
    contiguous halves would not be equal."""
    alone, *ranks = (
        block(Setting(KINDS[kind], LONG, cp=cp, cp_rank=rank, **changes)).phases()["forward"]
        for cp, rank in [(1, 0), *((4, rank) for rank in range(4))]
    )
    scores = [rank.attention_flops() for rank in ranks]
    assert sum(scores) == pytest.approx(alone.attention_flops())
    assert sum(rank.product_flops for rank in ranks) == alone.product_flops
    if kind == "swiglu":
        assert scores == [alone.attention_flops() / 4] * 4
        half = LONG // 2
        assert pairs(half, LONG, LONG, 0) == 3 * pairs(half, half, LONG, 0)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_gathered_keys_and_values_are_not_kept(mode: str) -> None:
    """What a block keeps for backward shrinks with cp: it keeps this rank's keys and values, not
    the gathered ones, which are as large as those of cp 1."""
    kept = []
    for cp in (1, 4):
        setting = Setting(SMALL, LONG, cp=cp, activation_checkpointing=mode)
        forward = block(setting).phases()["forward"]
        kept.append(sum(forward.effect.changes.values()))
    gathered = 2 * LONG * SMALL.num_kv_heads * SMALL.head_dim * 2
    assert kept[0] / 4 <= kept[1] < kept[0] / 4 + gathered / 2


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


def test_a_layer_that_asks_for_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self, x):
        return x * x.sum().item()

    monkeypatch.setattr("model.feed_forward.swiglu.FeedForward.forward", forward)
    unit.cache_clear()
    with pytest.raises(CannotRecord, match=r"'causal swiglu': does not run on .*Tensor.item"):
        unit(Setting(SMALL, LONG), "causal swiglu").phases()
    unit.cache_clear()


def test_torch_s_own_attention_is_recorded() -> None:
    """With every kind of mask, and also where values are narrower than keys."""
    shapes = (2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 4), (16, 16)
    q, k, narrow, mask = (torch.empty(*shape, device=DEVICE) for shape in shapes)
    attend = torch.nn.functional.scaled_dot_product_attention
    recorder = Recorder(lambda piece: None)
    with AsOnGpu(), recorder, recorder.phase("forward"):
        assert attend(q, k, narrow, is_causal=True, enable_gqa=True).shape == (2, 4, 16, 4)
        assert attend(q, k, k, mask, enable_gqa=True).shape == q.shape
    events = recorder.phases()["forward"].events
    found = [event.whole_flops for event in events if isinstance(event, Attention)]
    assert found == [2 * 4 * 16 * 16 * 2 * width for width in (12, 16)]
