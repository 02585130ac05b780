"""What a start says of its kernels of attention."""

from unittest.mock import patch

import pytest

from errors import UserError
from model.kernels.attention_choice import CPU, PLANNED
from runtime.start.attention import describe_attention
from settings.load import load_config
from tests import ROOT

HOPPER, WITH_3 = PLANNED, PLANNED._replace(flash3=True)
WINDOWS = ["model.attention=[sliding_window,causal]", "model.sliding_window.window=4096"]
NO_3 = "not flash 3: not installed"


def llama(*overrides, file="llama3_8b"):
    return load_config(str(ROOT / "configs" / f"{file}.yaml"), [*overrides])


@pytest.mark.parametrize(
    ("device", "overrides", "said"),
    [
        (HOPPER, [], "cuDNN 9.20.0"),
        (WITH_3, ["data.document_mask=true"], "flash 3"),
        (HOPPER, ["data.document_mask=true"], f"flash 2 ({NO_3})"),
        (HOPPER, ["train.deterministic=true"],
         f"flash 2 (not cuDNN: its backward is not deterministic; {NO_3})"),
        (HOPPER, WINDOWS, f"flash 2 ({NO_3}) in 16 layers, cuDNN 9.20.0 in 16 layers"),
        (HOPPER, [*WINDOWS, "train.seq_len=4096"], "cuDNN 9.20.0"),
        (WITH_3, ["model.attention_kernel=flash3"], "flash 3"),
        (CPU, [], "flash (CPU)"),
    ],
)  # fmt: skip
def test_the_line_at_the_start(device, overrides, said):
    with (
        patch("runtime.start.attention.this_device", lambda _: device),
        patch("model.kernels.attention_choice.load_flash3"),
    ):
        assert describe_attention(llama(*overrides), "cuda") == f"attention: {said}"


def test_a_kernel_that_cannot_run_is_refused_at_the_start():
    with pytest.raises(UserError, match="there is no GPU"):
        describe_attention(llama("model.attention_kernel=cudnn", file="laptop"), "cpu")
    broken = ImportError("undefined symbol")
    with (
        patch("runtime.start.attention.this_device", lambda _: WITH_3),
        patch("model.kernels.attention_choice.load_flash3", side_effect=broken),
        pytest.raises(UserError, match=r"torch cannot load it \(undefined symbol\)"),
    ):
        describe_attention(llama("data.document_mask=true"), "cuda")
