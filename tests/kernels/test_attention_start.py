"""What a start says of its kernels of attention, and that it makes the calls of a step once."""

from unittest.mock import Mock, patch

import pytest
import torch

from costs import units
from costs.as_on_gpu import AsOnGpu
from costs.setting import Setting
from costs.units import kinds_of_layers
from errors import UserError
from model.kernels.attention_choice import CPU, PLANNED
from parallel.context import ContextParallel
from runtime.start.attention import check_attention, describe_attention, make_calls
from settings.load import load_config
from tests import ROOT
from tests.counting import Operators

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
    with patch("runtime.start.attention.this_device", lambda _: device):
        assert describe_attention(llama(*overrides), "cuda") == f"attention: {said}"


class Calls(Operators):
    """Notes the calls of attention and of its backward: the operator, the shapes of queries, keys
    and values, forward their strides, and for packed sequences the longest and the window."""

    def __init__(self):
        super().__init__()
        self.calls: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.name() or "attn" in func.name():
            backward = "backward" in func.name()
            tensors = [t for t in args if isinstance(t, torch.Tensor)][backward : 3 + backward]
            about = [t.shape if backward else (t.shape, t.stride()) for t in tensors]
            numbers = [each for each in args if not isinstance(each, torch.Tensor)]
            numbers = numbers if "varlen" in func.name() else []
            self.calls.add((func.name(), str(about), str(numbers)))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("file", "overrides", "cp_rank"),
    [
        ("llama3_8b", ["parallel.tp=2"], 0),
        ("llama3_8b", ["data.document_mask=true", "train.micro_batch_size=2"], 0),
        ("llama3_8b", [*WINDOWS, "model.num_kv_heads=2", "parallel.tp=4"], 0),
        # the first chunk and the last one; two in the middle; two that are one
        ("llama3_8b_131072", ["data.document_mask=false"], 0),
        ("llama3_8b_131072", ["data.document_mask=false", "train.dtype=float32"], 1),
        ("llama3_8b_131072", ["data.document_mask=false", "model.attention_kernel=flash2"], 3),
    ],
)
def test_a_start_makes_the_calls_of_a_step(monkeypatch, file, overrides, cp_rank):
    """All of them and no others: heads, chunks, windows, documents, strides."""
    config = llama(*overrides, "guard.examine=false", file=file)
    monkeypatch.setattr("model.documents.to_device", lambda x, device: x.to(device))
    size = config.parallel.cp
    with AsOnGpu(), Calls() as tried:
        make_calls(config, "meta", ContextParallel(size, cp_rank))
    setting = Setting(
        config.model, config.train.seq_len, config.parallel.tp, cp=size, cp_rank=cp_rank,
        micro_batch_size=config.train.micro_batch_size, document_mask=config.data.document_mask,
        dtype=config.precision.compute,
    )  # fmt: skip
    with Calls() as made:
        for kind in {*kinds_of_layers(config.model)}:
            units._run(setting, kind, False, None)
    assert tried.calls == made.calls
    assert len(made.calls) >= 2  # forward and backward


def test_a_kernel_that_fails_is_refused_at_the_start(monkeypatch):
    with pytest.raises(UserError, match="there is no GPU"):
        check_attention(llama("model.attention_kernel=cudnn", file="laptop"), "cpu")
    config = llama()
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("runtime.start.attention.this_device", lambda _: HOPPER)
    calls = Mock(side_effect=RuntimeError("cuDNN error: No plans support the graph.\nmore"))
    monkeypatch.setattr("runtime.start.attention.make_calls", calls)
    with pytest.raises(UserError, match=r"the graph. \(attention: cuDNN 9.20.0\)") as refused:
        check_attention(config, "cuda")
    assert refused.value.key == "model.attention_kernel"
    assert "for example flash2" in refused.value.remedy
    # memory may be free after a restart
    calls.side_effect = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        check_attention(config, "cuda")
