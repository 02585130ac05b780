"""Kernels work with activation checkpointing, and each run gets the right implementation."""

import os
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from errors import UserError
from model.kernels import backend
from model.kernels.attention import OPERATORS
from model.kernels.rms_norm import add_rms_norm, rms_norm
from model.kernels.rotary import rotate
from model.kernels.swiglu import swiglu
from parallel.activation import wrap_blocks
from tests import ROOT
from tests.counting import Operators
from tests.runs import forked, status

S, B, D = 8, 2, 32


class AllKernels(nn.Module):
    """A block that only uses our operations."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D).double())
        self.angles = torch.randn(2, S, 1, 1, 4).double()

    def forward(self, x):
        y = rms_norm(x * 2, self.weight, 1e-5, "triton").unflatten(-1, (-1, 8))
        q, k = rotate(y, y * 2, *self.angles, "triton")
        z = swiglu(q.flatten(-2), k.flatten(-2), "triton")
        return sum(add_rms_norm(z, x, self.weight, 1e-5, "triton")) * 2


def results(mode):
    """Output and gradients of such a block, and the number of calls of each of our operations."""
    torch.manual_seed(0)
    block, x = AllKernels(), torch.randn(S, B, D).double().requires_grad_()
    wrap_blocks([block], mode, False, 1, OPERATORS)
    with Operators() as seen:
        y = block(x)
        y.cos().sum().backward()
    names = Counter(str(each).split(".")[1] for each in seen.found if "lattice" in str(each))
    return [y.detach(), x.grad, block.weight.grad], names


@pytest.mark.skipif(backend.why_not_triton("cpu") is not None, reason="needs Triton")
def test_what_runs_again_under_activation_checkpointing():
    """Without activation checkpointing every kernel runs once; with it, forward kernels run a
    second time, backward kernels do not."""
    forward = {"rms_norm": 2, "swiglu": 1}
    backward = {"rms_norm_backward": 2, "swiglu_backward": 1}
    expected, once = results("none")
    assert once == {**forward, **backward, "rotate": 2}  # the rotation's backward is a rotation
    for mode in ("selective", "full"):
        found, operations = results(mode)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert operations == {"rms_norm": 4, "swiglu": 2, **backward, "rotate": 3}


def test_auto_is_pytorch_on_a_cpu_and_triton_on_a_gpu():
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
    for x, auto in ((torch.empty(1), False), (on_gpu, True)):
        found = [backend.use_triton(x, mode) for mode in ("auto", "triton", "torch")]
        assert found == [auto, True, False]


@pytest.mark.parametrize(
    ("triton", "interpreted", "accepted", "refused", "said"),
    [
        (None, False, ["auto cpu", "torch cuda"], ["triton cpu", "triton cuda", "auto cuda"],
         r"model\.kernels.*set model\.kernels="),
        # a GPU's kernels are not interpreted
        (object(), True, ["torch cuda", "triton cpu"], ["auto cuda", "triton cuda"],
         "unset TRITON_INTERPRET"),
    ],
    ids=["without Triton", "interpreted"],
)  # fmt: skip
def test_a_run_that_cannot_have_its_kernels_is_refused(
    monkeypatch, triton, interpreted, accepted, refused, said
):
    monkeypatch.setattr(backend, "triton", triton)
    monkeypatch.setattr(backend, "INTERPRETED", interpreted)
    for each in accepted:
        backend.check_kernels(*each.split())
    for each in refused:
        with pytest.raises(UserError, match=f"(?s){said}"):
            backend.check_kernels(*each.split())


def import_without_triton():
    """Imports train.py and all that it needs anew; torch remains."""
    for name, module in [*sys.modules.items()]:
        if str(ROOT) in str(getattr(module, "__file__", None)) and ".venv" not in module.__file__:
            del sys.modules[name]
    sys.modules["triton"] = None
    import train  # noqa: F401
    from model.kernels import backend

    os._exit(0 if backend.triton is None else 3)


def test_nothing_needs_triton_to_be_installed(tmp_path):
    """train.py can be imported without Triton, which CPU builds of torch do not include."""
    log = tmp_path / "log"
    assert status(forked(log, import_without_triton)) == 0, log.read_text()
