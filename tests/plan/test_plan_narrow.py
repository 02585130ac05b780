"""The planner warns of matrix products with fewer tiles than the device has multiprocessors."""

from dataclasses import replace

import pytest

from costs.events import Product
from costs.seconds import Links, Rates
from hardware import H100, Device
from settings.load import load_config
from tests import ROOT
from tools.plan.__main__ import main
from tools.plan.layout import Layout
from tools.plan.summary import describe_narrow, narrow_products

CONFIGS = ROOT / "configs"
# of every layout here that does not state another
PIPELINE = ["parallel.schedule=1f1b", "parallel.stages_per_rank=1", "parallel.tp_pieces=1"]
LARGE = ("llama3_70b", "parallel.tp=8")
KEY_AND_VALUE = ["attention.key", "attention.value"]


def layout(name: str, *keys: str, world: int = 256) -> Layout:
    return Layout(load_config(str(CONFIGS / f"{name}.yaml"), [*PIPELINE, *keys]), world, 0)


def narrow(*keys: str) -> list[tuple[list[str], int]]:
    return [(one["weights"], one["tiles"]) for one in narrow_products(layout(*keys), H100)]


def test_key_and_value_of_70b_at_tp_8_are_narrow() -> None:
    """128 columns of 8,192 tokens are 64 tiles of 128 × 128, of which an H100 computes 132 at
    once. Controls: at tp 2 the weights are wide enough; with four sequences in a micro-batch only
    the weight gradients are narrow; a device of 64 multiprocessors has work for all of them."""
    assert narrow(*LARGE) == [(KEY_AND_VALUE, 64)]
    assert narrow(*LARGE, "parallel.schedule=zb_h1") == [(KEY_AND_VALUE, 64)]  # split backwards
    assert narrow(*LARGE, "parallel.tp=4") == [(KEY_AND_VALUE, 128)]
    assert narrow(*LARGE, "parallel.tp=2") == []
    both, gradient = (
        narrow_products(layout(*LARGE, f"train.micro_batch_size={size}"), H100)[0]["results"]
        for size in (1, 4)
    )
    assert both == [(128, 8192), (8192, 128)]
    assert gradient == [(128, 8192)]
    pieces = [(KEY_AND_VALUE, 32), (KEY_AND_VALUE, 64)]  # of the inputs, and weight gradients
    assert narrow(*LARGE, "parallel.tp_pieces=2") == pieces
    small = replace(H100, multiprocessors=64)
    assert narrow_products(layout(*LARGE), small) == []


def seconds(rows: int, columns: int, device: Device = H100, width: int = 2) -> float:
    """Seconds of a product (in bfloat16) whose sums are so long that its bytes do not matter."""
    rates = Rates(replace(device, kernel_seconds=0.0), Links(device, 1, 1, 1, 1), 2)
    return rates.operation(Product(rows, columns, inner=2**20, bytes=0, width=width))


def test_a_product_takes_whole_waves() -> None:
    """1 to 132 tiles are one wave on an H100, 133 are two. Controls: full waves take the time of
    their FLOPs, and on a device with a single multiprocessor every tile counts."""
    one = seconds(128, 128)
    assert seconds(64 * 128, 128) == seconds(132 * 128, 128) == one
    assert seconds(132 * 128 + 1, 128) == seconds(128, 264 * 128) == 2 * one
    flops = 2.0 * 132 * 128 * 128 * 2**20
    assert one == pytest.approx(flops / (H100.peak_flops * H100.matmul_efficiency))
    # whatever the run's dtype: the math kernel of attention widens its factors
    assert seconds(128, 128, width=4) / one == pytest.approx(H100.peak(2) / H100.peak(4))
    alone = replace(H100, multiprocessors=1)
    assert seconds(64 * 128, 128, alone) == 64 * seconds(128, 128, alone)


def test_the_warning_names_weights_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """Control: where nothing is narrow, nothing is said."""
    assert main([str(CONFIGS / "llama3_70b.yaml"), "parallel.tp=8"]) == 0
    printed = capsys.readouterr().out
    assert "than the 132 multiprocessors" in printed
    assert "attention.key, attention.value: results of 4,096 × 128, 32 tiles" in printed
    assert "attention.key, attention.value: results of 128 × 8,192, 64 tiles" in printed
    assert "a smaller parallel.tp; a larger train.micro_batch_size" in printed
    assert describe_narrow(narrow_products(layout("llama3_8b", world=8), H100), H100, 1) == []
    one = narrow_products(layout("llama_1b", world=8), H100)
    assert "parallel.tp" not in describe_narrow(one, H100, 1)[-1], "there is no smaller one"
