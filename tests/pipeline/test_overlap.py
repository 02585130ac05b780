"""Tensor parallelism's communication is hidden behind products, piece by piece
(parallel.tp_pieces), and selective checkpointing repeats none that it need not."""

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from costs.collectives import Call
from costs.events import Event, Product, Sent, Waited
from costs.recorder import Effect, Phase
from costs.seconds import Links, Rates
from costs.setting import Setting
from costs.units import unit
from hardware import H100
from model.config import ModelConfig
from parallel.kept import KeptOutputs

SMALL = ModelConfig(dim=256, num_layers=1, num_heads=8, num_kv_heads=4, ffn_dim=704,
                    vocab_size=1000)  # fmt: skip
LONG, TP = 512, 4
HIDDEN = LONG * SMALL.dim * 2  # bytes of [S, 1, D] in bfloat16


def phases(**changes: Any) -> dict[str, Phase]:
    setting = replace(Setting(SMALL, LONG, tp=TP), **changes)
    return unit(setting, "causal swiglu").phases()


def behind_nothing(phase: Phase) -> dict[str, int]:
    """For each kind, the bytes of collectives between whose start and wait no product runs."""
    products = 0
    started: dict[int, tuple[Sent, int]] = {}
    found: Counter[str] = Counter()
    for event in phase.events:
        if isinstance(event, Product):
            products += 1
        elif isinstance(event, Sent):
            started[event.number] = event, products
        elif isinstance(event, Waited):
            sent, before = started.pop(event.number)
            found[sent.call.kind] += sent.call.bytes * (products == before)
    assert not started, "every collective is waited for"
    return {kind: size for kind, size in found.items() if size}


# Hidden states that are sent behind no product, in forward and in backward, if the sequence is one
# piece: forward's two gathers and scatters; backward's gathers of dy; what is recomputed.
WHOLE: list[tuple[dict[str, Any], dict[str, int], dict[str, int]]] = [
    ({}, {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 2}),
    ({"activation_checkpointing": "full"}, {"all_gather": 2, "reduce_scatter": 2},
     {"all_gather": 2 + 2, "reduce_scatter": 1}),
    # it has the outputs of column-parallel layers, so it does not gather their input again; beside
    # its product the first dy is gathered
    ({"activation_checkpointing": "selective"}, {"all_gather": 2, "reduce_scatter": 2},
     {"all_gather": 1, "reduce_scatter": 1}),
    ({"sequence_parallel": False}, {"all_reduce": 2}, {}),
]  # fmt: skip


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(("changes", "forward", "backward"), WHOLE, ids=str)
def test_all_but_one_piece_is_behind_products(
    changes: dict[str, Any], forward: dict[str, int], backward: dict[str, int], pieces: int
) -> None:
    """Of p pieces, only the first of a gather and the last of a scatter are sent while no product
    runs: 1/p of the bytes. Control: with one piece, all of them."""
    found = phases(tp_pieces=pieces, **changes)
    for name, whole in (("forward", forward), ("backward", backward)):
        expected = {kind: n * HIDDEN // pieces for kind, n in whole.items()}
        assert behind_nothing(found[name]) == expected, name


def test_pieces_change_neither_operations_nor_bytes_nor_what_is_kept() -> None:
    for changes, *_ in WHOLE:
        one, four = phases(**changes), phases(tp_pieces=4, **changes)
        for name in ("forward", "backward"):
            assert four[name].product_flops == one[name].product_flops
            sent = [sum(call.bytes for call in each[name].sends.elements()) for each in (one, four)]
            assert sent[0] == sent[1] > 0
            assert four[name].effect.changes == one[name].effect.changes


def test_collectives_of_one_group_run_one_after_another() -> None:
    """Two collectives that start together end one after the other, so a product hides only its own
    seconds of their sum."""
    rates = Rates(H100, Links(H100, TP, 1, 1, TP), 2)
    a, b = (Sent(Call("tp", "all_gather", 1 << 30), number) for number in (0, 1))
    wait_a, wait_b, one = Waited(0), Waited(1), rates.links.collective("tp", 1 << 30)
    # a product that takes half as long as a collective, its launch included: one wave of tiles
    rows, columns = H100.tile * H100.multiprocessors, H100.tile
    flops = (one / 2 - H100.kernel_seconds) * H100.peak(2) * H100.matmul_efficiency
    half = Product(rows, columns, inner=round(flops / (2 * rows * columns)), bytes=0, width=2)

    def exposed(*events: Event) -> float:
        """In units of the seconds of one collective."""
        exposed = rates.cost(Phase(events, Effect(0, {}, {}), (), ())).exposed
        return sum(exposed.values()) / one

    assert exposed(a, wait_a, b, wait_b) == pytest.approx(2)
    assert exposed(a, b, wait_a, wait_b) == pytest.approx(2)
    assert exposed(a, b, half, wait_a, wait_b) == pytest.approx(1.5)
    assert exposed(a, b, wait_a, half, wait_b) == pytest.approx(1.5)
    assert exposed(a, b, wait_a, half, half, half, wait_b) == pytest.approx(1)


def test_a_kept_output_that_was_modified_is_refused() -> None:
    """One that was not modified is returned without being computed again."""
    for changed in (False, True):
        kept = KeptOutputs()
        forward, again = kept.contexts()
        with forward:
            (y,) = kept.of(lambda: (torch.ones(2),))
            if changed:
                y.mul_(2)
        with again:
            refused = pytest.raises(RuntimeError, match="modified in place")
            with refused if changed else contextlib.nullcontext():
                assert kept.of(lambda: pytest.fail("computed again"))[0].tolist() == [1, 1]
