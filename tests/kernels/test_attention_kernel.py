"""The choice of the kernel that computes attention: every rule on pretended devices, what a start
says of it, that the chosen operator is the one that is called, kept by checkpointing and compiled.
gpu/test_runs.py runs the kernels on a GPU."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

from costs.as_on_gpu import AsOnGpu
from errors import UserError
from model.documents import Documents
from model.kernels import attention_choice
from model.kernels.attention import (
    CUDNN,
    EFFICIENT,
    FLASH2,
    FLASH3,
    MATH,
    ON_CPU,
    OPERATORS,
    by_math,
)
from model.kernels.attention_choice import (
    BY_REQUEST,
    CPU,
    PLANNED,
    Call,
    Choice,
    Device,
    choose,
    choose_for_steps,
)
from model.mask import Mask, make_mask, scores_bias
from parallel.activation import wrap_blocks
from runtime.start.attention import describe_attention
from settings.load import load_config
from tests import ROOT
from tests.counting import Operators

HOPPER = PLANNED
CAPABILITIES = (10, 0), (8, 0), (8, 9), (7, 5)
BLACKWELL, AMPERE, ADA, TURING = (PLANNED._replace(capability=each) for each in CAPABILITIES)
AMD = Device((9, 4), amd=True)
WITH_3 = HOPPER._replace(flash3=True)
CAUSAL = Call(torch.bfloat16, 128, 8192, packed=False, deterministic=False)
PACKED = CAUSAL._replace(packed=True)


def test_what_nothing_speaks_against():
    """The baselines, from which each row of RULES differs in one respect."""
    for device in (HOPPER, BLACKWELL, WITH_3):
        assert choose(device, CAUSAL) == Choice(CUDNN, " 9.20.0", ())
    assert choose(WITH_3, PACKED) == Choice(FLASH3, "", ())
    assert choose(CPU, CAUSAL) == choose(CPU, PACKED) == Choice(ON_CPU, "", ())


RULES = [  # (baseline's kernel, device, call, chosen kernel, what speaks against the baseline's)
    (CUDNN, AMPERE, CAUSAL, FLASH2, "not known to be faster on compute capability 8.0"),
    (CUDNN, AMD, CAUSAL, FLASH2, "there is no cuDNN"),
    (CUDNN, HOPPER._replace(cudnn=None), CAUSAL, FLASH2, "there is no cuDNN"),
    (CUDNN, HOPPER._replace(cudnn=91500), CAUSAL, FLASH2, "9.15.0 is older than 9.15.1"),
    (CUDNN, HOPPER, PACKED, FLASH2, "takes no documents, windows or later chunks"),
    (CUDNN, HOPPER, CAUSAL._replace(length=8256), FLASH2, "a multiple of 128 tokens, not 8256"),
    (CUDNN, HOPPER, CAUSAL._replace(deterministic=True), FLASH2, "not deterministic"),
    (CUDNN, HOPPER, CAUSAL._replace(head_dim=256), FLASH2, "at most 128, not 256"),
    (CUDNN, HOPPER, CAUSAL._replace(dtype=torch.float32), EFFICIENT, "not in float32"),
    (CUDNN, HOPPER, CAUSAL._replace(head_dim=100), MATH, "multiple of 8, not 100"),
    (FLASH3, HOPPER, PACKED, FLASH2, "not installed"),
    (FLASH3, WITH_3._replace(torch=(2, 12)), PACKED, FLASH2, "needs torch 2.13, not 2.12"),
    (FLASH3, WITH_3._replace(capability=(10, 0)), PACKED, FLASH2, "compute capability 10.0"),
    (FLASH3, AMD._replace(flash3=True), PACKED, FLASH2, "runs on Hopper, not on AMD"),
    (FLASH3, WITH_3, PACKED._replace(deterministic=True), FLASH2, "not deterministic"),
    (FLASH3, WITH_3, PACKED._replace(head_dim=264), EFFICIENT, "most 256, not 264"),
    (FLASH2, TURING, CAUSAL, MATH, "does not run on compute capability 7.5"),
    (FLASH2, ADA, CAUSAL._replace(head_dim=208), EFFICIENT, "takes no heads of 208"),
    (FLASH2, AMPERE, CAUSAL._replace(dtype=torch.float32), EFFICIENT, "in 16 bits"),
    (EFFICIENT, TURING, CAUSAL, MATH, "does not compute in bfloat16"),
    (EFFICIENT, AMPERE, CAUSAL._replace(dtype=torch.float64), MATH, "not compute in float64"),
    (EFFICIENT, AMPERE, CAUSAL._replace(head_dim=100), MATH, "of 16 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("usual", "device", "call", "chosen", "reason"), RULES)
def test_what_speaks_against_a_kernel(usual, device, call, chosen, reason):
    choice = choose(device, call)
    assert choice.kernel is chosen
    said = dict(choice.passed_over)
    if usual is CUDNN and call.packed:  # it is not among the kernels for documents
        assert "cuDNN" not in said
    else:
        assert reason in said[usual.name]
    wanted = {CUDNN: "cudnn", FLASH2: "flash2", FLASH3: "flash3"}.get(usual)
    if "not known to be faster" in reason:  # it is right, so a request is granted
        assert choose_for_steps(device, call, wanted) == Choice(usual, " 9.20.0", ())
    elif wanted is not None:
        with pytest.raises(UserError, match=reason) as refused:
            choose_for_steps(device, call, wanted)
        assert "set model.attention_kernel=auto" in str(refused.value)
        assert choose(device, call, wanted).kernel is chosen  # of a call that no step makes


@pytest.mark.parametrize(
    ("name", "value"), [("OLDEST_CUDNN", 0), ("TILE", 1), ("FAST_CUDNN", ((8, 0), (9, 0)))]
)
def test_a_forgotten_rule_is_found(name, value):
    # Plant: a limit of cuDNN is gone; some row of the table then fails.
    choose.cache_clear()
    with patch.object(attention_choice, name, value):
        rows = [row for row in RULES if row[0] is CUDNN]
        assert any(choose(device, call).kernel is not chosen for _, device, call, chosen, _ in rows)
    choose.cache_clear()


@pytest.mark.parametrize("wanted", BY_REQUEST)
def test_no_length_is_refused_in_a_run(monkeypatch, wanted):
    """Evaluation pads rows to 32, 64, …: what the wanted kernel cannot compute, another one does.
    torch's flag says nothing. (test_examine.py has an examination, whose results repeat.)"""
    monkeypatch.setattr(attention_choice, "PLANNED", WITH_3)
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    for length in (8192, 4160, 32):
        positions = torch.empty((length, 1), dtype=torch.int64, device="meta")
        with AsOnGpu(), patch.object(attention_choice, "load_flash3") as load:
            mask = make_mask(positions, None, None, torch.bfloat16, 128, wanted)
        flash = "flash3" if load.called else "flash2"
        found = {CUDNN.run: "cudnn", FLASH2.run: flash}[mask.dense]
        assert found == ("flash3" if wanted == "cudnn" and length % 128 else wanted)


def inputs(call, device="meta"):
    """q [S, 1, 4, E], k and v [S, 1, 2, E]."""
    shapes = [(call.length, 1, heads, call.head_dim) for heads in (4, 2, 2)]
    of = {"dtype": call.dtype, "device": device, "requires_grad": True}
    return [torch.randn(shape, **of) for shape in shapes]


class Attending(nn.Module):
    """A block that only computes attention."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return self.mask(q * 2, k, v) * 2


def ran(mask, call, kept, device="meta"):
    """The operators of attention in forward and backward, with selective recomputation."""
    block, qkv = Attending(mask), inputs(call, device)
    wrap_blocks([block], "selective", False, 1, kept)
    with AsOnGpu() if device == "meta" else nullcontext(), Operators() as seen:
        y = block(*qkv)
        y.sum().backward()
    assert y.shape == qkv[0].shape
    assert all(t.grad.shape == t.shape for t in qkv)
    return seen.attention()


@pytest.mark.parametrize(
    ("device", "call", "chosen"),
    [
        (HOPPER, CAUSAL, CUDNN),
        (AMPERE, CAUSAL, FLASH2),
        (HOPPER, CAUSAL._replace(length=8256), FLASH2),
        (HOPPER, PACKED, FLASH2),
        (HOPPER, CAUSAL._replace(dtype=torch.float32), EFFICIENT),
        (HOPPER, PACKED._replace(dtype=torch.float32, length=99), EFFICIENT),
        (HOPPER, PACKED._replace(dtype=torch.float64), MATH),
    ],
)
def test_the_operator_that_runs_is_the_chosen_one(monkeypatch, device, call, chosen):
    monkeypatch.setattr(attention_choice, "PLANNED", device)
    assert choose(device, call).kernel is chosen
    positions = torch.empty((call.length, 1), dtype=torch.int64, device="meta")
    documents = None
    if call.packed:
        boundaries = torch.empty(3, dtype=torch.int32, device="meta")
        documents = Documents(boundaries, boundaries, (0, 0), (call.length, call.length))
    with AsOnGpu():
        mask = make_mask(positions, documents, None, call.dtype, call.head_dim)
    at = 1 if call.packed and chosen.packs else 0
    operators = list(chosen.operators[at : at + 1])
    assert ran(mask, call, OPERATORS) == operators
    assert ran(mask, call, frozenset()) == operators * 2  # control: not kept, it runs again


def test_kernels_are_compiled_as_one_graph():
    kernels, backend = (CUDNN, FLASH2, EFFICIENT, MATH), AotEagerAndRecordGraphs()

    def all_of_them(*qkv):
        return sum(Mask(dense=kernel.run)(*qkv) for kernel in kernels)

    compiled = torch.compile(all_of_them, backend=backend, fullgraph=True)
    compiled(*inputs(CAUSAL)).sum().backward()
    (graph,) = backend.fw_graphs
    operators = {operator for kernel in kernels for operator in kernel.operators[:1]}
    assert operators <= {node.target for node in graph.graph.nodes}


def test_blocks_with_other_numbers_of_heads_are_compiled():
    """After the first, the compiler makes the numbers of heads symbols."""

    def both(*qkv):
        return ON_CPU.run(*qkv, None) + MATH.run(*qkv, None)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for heads, shared in ((4, 2), (8, 4), (6, 3)):
        q, k, v = (torch.randn(2, n, 16, 8, requires_grad=True) for n in (heads, shared, shared))
        compiled(q, k, v).sum().backward()
        assert q.grad is not None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_cpu_and_math_compute_what_torch_does(dtype, biased):
    """The CPU's operator is the one that the start names; math agrees with it to rounding."""
    window, positions = 3 if biased else None, torch.arange(24).unsqueeze(1)
    call = CAUSAL._replace(dtype=dtype, head_dim=16, length=24)
    mask = make_mask(positions, None, window, dtype, 16)
    assert ran(mask, call, OPERATORS, "cpu") == [*ON_CPU.operators]
    q, k, v = (t.detach() for t in inputs(call, "cpu"))
    q, k, v, y = (t.permute(1, 2, 0, 3) for t in (q, k, v, mask(q, k, v)))  # heads first
    bias, other = scores_bias(positions, dtype, window), scores_bias(positions, dtype, 5)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    bound = 8 * torch.finfo(dtype).eps
    assert (y - expected).abs().max() < bound
    assert (by_math(q, k, v, bias if biased else None) - expected).abs().max() < bound
    assert (by_math(q, k, v, other) - expected).abs().max() > 0.1  # control: another mask


# --- the start ------------------------------------------------------------------------------------

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
        patch.object(attention_choice, "load_flash3"),
    ):
        assert describe_attention(llama(*overrides), "cuda") == f"attention: {said}"


def test_a_kernel_that_cannot_run_is_refused_at_the_start():
    for wanted in BY_REQUEST:
        assert choose(CPU, CAUSAL, wanted).kernel is ON_CPU
        with pytest.raises(UserError, match="there is no GPU"):
            describe_attention(llama(f"model.attention_kernel={wanted}", file="laptop"), "cpu")
    broken = ImportError("libcudart.so.13: cannot open")
    said = rf"(?s)torch cannot load it \({broken}\).*model.attention_kernel=flash2"
    with (
        patch("runtime.start.attention.this_device", lambda _: WITH_3),
        patch.object(attention_choice, "load_flash3", side_effect=broken),
        pytest.raises(UserError, match=said),
    ):
        describe_attention(llama("data.document_mask=true"), "cuda")
