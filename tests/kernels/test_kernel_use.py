"""Kernels work with the compiler, with activation checkpointing and with tensors without data; and
each run gets the right implementation."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from errors import UserError
from model.kernels import backend
from model.kernels.attention import OPERATORS
from model.kernels.rms_norm import add_rms_norm, rms_norm
from model.kernels.rotary import rotate
from model.kernels.swiglu import swiglu
from model.positions import BatchPositions
from model.transformer import Block
from parallel.activation import wrap_blocks
from parallel.axes import MeshSizes
from parallel.context import ContextParallel
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from proofs.parity.cases import Case
from tests import ROOT
from tests.counting import Listener

needs_triton = pytest.mark.skipif(backend.why_not_triton("cpu") is not None, reason="needs Triton")
S, B = 8, 2


def block_gradients(case, mode, compile):
    """Output and gradients of a block, and the number of calls of each of our operations."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), "cpu")
    torch.manual_seed(0)
    block = (
        Block(config.model, 0, TensorParallel.of(mesh.tp, case.sequence_parallel))
        .to(torch.float64)
        .to_empty(device="cpu")
    )
    with torch.no_grad():
        for p in block.parameters():
            p.to_local().normal_(std=0.2)
    x = torch.randn(S, B, config.model.dim, dtype=torch.float64, requires_grad=True)
    positions = BatchPositions(torch.arange(S).unsqueeze(1), None, torch.float64, ContextParallel())
    inputs = block.attention.inputs(positions)
    wrap_blocks([block], mode, compile, mesh.tp.size(), OPERATORS)
    listener = Listener(mesh)
    # no Listener when compiling, because the compiler skips code under a dispatch mode
    with nullcontext() if compile else listener:
        y = block(x, *inputs)
        y.cos().sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in block.named_parameters()}
    ours = {
        name.removeprefix("lattice::"): n
        for name, n in listener.operations.items()
        if name.startswith("lattice::")
    }
    return [y.detach(), x.grad, *gradients.values()], ours


def run_alone(ranks, *arguments):
    ((tensors, operations),) = ranks.run(block_gradients, 1, *arguments)
    return tensors, operations


@pytest.mark.thorough
@needs_triton
def test_a_compiled_block_has_them_as_operations(ranks):
    expected, _ = run_alone(ranks, Case(MeshSizes()), "none", False)
    for mode in ("none", "selective"):
        found, _ = run_alone(ranks, Case(MeshSizes(), kernels="triton"), mode, True)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()


@needs_triton
def test_what_runs_again_under_activation_checkpointing(ranks):
    """Without activation checkpointing every kernel runs once; with it, forward kernels run a
    second time, backward kernels do not."""
    forward = {"rms_norm": 1, "add_rms_norm": 1, "swiglu": 1}
    backward = {"rms_norm_backward": 2, "swiglu_backward": 1}
    expected, once = run_alone(ranks, Case(MeshSizes(), kernels="triton"), "none", False)
    assert once == {**forward, **backward, "rotate": 2}  # the rotation's backward is a rotation
    for mode in ("selective", "full"):
        found, operations = run_alone(ranks, Case(MeshSizes(), kernels="triton"), mode, False)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert operations == {**dict.fromkeys(forward, 2), **backward, "rotate": 3}


def through_all(device):
    """Run each operation forward and backward on tensors of `device`."""

    def empty(*shape):
        return torch.empty(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    cos = sin = torch.empty(S, 1, 1, 8, device=device)
    x, r, w, q, k = (
        empty(S, B, 32),
        empty(S, B, 32),
        empty(32),
        empty(S, B, 4, 16),
        empty(S, B, 2, 16),
    )
    outputs = [
        rms_norm(x, w, 1e-5, "triton"),
        *add_rms_norm(x, r, w, 1e-5, "triton"),
        swiglu(x, r, "triton"),
    ]
    outputs += rotate(q, k, cos, sin, "triton")
    torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    for tensor in (x, r, w, q, k):
        assert tensor.grad.shape == tensor.shape
        assert tensor.grad.dtype == tensor.dtype
    return outputs


def test_tensors_without_data():
    """Operations return the right shapes for tensors without data, as used to plan runs that do not
    fit this machine. No kernel is launched, so none needs to exist."""
    assert all(y.device.type == "meta" for y in through_all("meta"))
    with FakeTensorMode():
        assert {y.shape for y in through_all("cpu")} == {(S, B, 32), (S, B, 4, 16), (S, B, 2, 16)}


def test_auto_is_pytorch_on_a_cpu_and_triton_on_a_gpu():
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
    for x, auto in ((torch.empty(1), False), (on_gpu, True)):
        assert [backend.use_triton(x, mode) for mode in ("auto", "triton", "torch")] == [
            auto,
            True,
            False,
        ]


def test_a_run_that_cannot_have_triton_is_refused(monkeypatch):
    backend.check_kernels("auto", "cpu")
    backend.check_kernels("torch", "cuda")
    monkeypatch.setattr(backend, "triton", None)
    for mode, device in (("triton", "cpu"), ("triton", "cuda"), ("auto", "cuda")):
        with pytest.raises(UserError, match=r"model\.kernels") as refused:
            backend.check_kernels(mode, device)
        assert "set model.kernels=" in str(refused.value)


def test_nothing_needs_triton_to_be_installed():
    """train.py can be imported without Triton, which CPU builds of torch do not include."""
    code = (
        "import sys; sys.modules['triton'] = None; import train; from model.kernels import backend"
    )
    code += "; sys.exit(backend.triton is not None)"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
