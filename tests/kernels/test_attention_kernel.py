"""The choice of the kernel that computes attention: every rule on pretended devices, that the
chosen operator is the one that is called, kept by checkpointing and compiled.
test_attention_start.py has what a start does, and gpu/test_runs.py runs the kernels on a GPU."""

import subprocess
import sys
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
    Dense,
    Kernel,
    by_math,
    by_torch,
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
    made_ready,
)
from model.mask import Mask, make_mask, scores_bias
from parallel.activation import wrap_blocks
from tests import ROOT
from tests.counting import Operators
from tests.kernels.flash import flash_attention_stands_in

HOPPER = PLANNED
BLACKWELL, AMPERE, ADA, TURING = (
    PLANNED._replace(capability=capability) for capability in ((10, 0), (8, 0), (8, 9), (7, 5))
)
AMD = Device((9, 4), amd=True)
WITH_3 = HOPPER._replace(flash3=True)
CAUSAL = Call(torch.bfloat16, 128, 128, 8192, packed=False, deterministic=False)
PACKED = CAUSAL._replace(packed=True)

# --- the rules ------------------------------------------------------------------------------------


def test_what_nothing_speaks_against() -> None:
    """The baselines, from which each row of RULES differs in one respect."""
    assert choose(HOPPER, CAUSAL) == Choice(CUDNN, " 9.20.0", ())
    assert choose(BLACKWELL, CAUSAL) == Choice(CUDNN, " 9.20.0", ())
    assert choose(WITH_3, CAUSAL) == Choice(CUDNN, " 9.20.0", ())
    assert choose(WITH_3, PACKED) == Choice(FLASH3, "", ())
    assert choose(CPU, CAUSAL) == choose(CPU, PACKED) == Choice(ON_CPU, "", ())


RULES = [  # (baseline's kernel, device, call, chosen kernel, what speaks against the baseline's)
    (CUDNN, AMPERE, CAUSAL, FLASH2, "not known to be faster on compute capability 8.0"),
    (CUDNN, ADA, CAUSAL, FLASH2, "not known to be faster on compute capability 8.9"),
    (CUDNN, AMD, CAUSAL, FLASH2, "there is no cuDNN"),
    (CUDNN, HOPPER._replace(cudnn=None), CAUSAL, FLASH2, "there is no cuDNN"),
    (CUDNN, HOPPER._replace(cudnn=91500), CAUSAL, FLASH2, "9.15.0 is older than 9.15.1"),
    (CUDNN, HOPPER._replace(cudnn=91002), CAUSAL, FLASH2, "9.10.2 is older than 9.15.1"),
    (CUDNN, HOPPER, PACKED, FLASH2, "takes no documents or windows"),
    (CUDNN, HOPPER, CAUSAL._replace(length=8256), FLASH2, "a multiple of 128 tokens, not 8256"),
    (CUDNN, HOPPER, CAUSAL._replace(deterministic=True), FLASH2, "not deterministic"),
    (CUDNN, HOPPER, CAUSAL._replace(head_dim=256, value_dim=256), FLASH2, "at most 128, not 256"),
    (CUDNN, HOPPER, CAUSAL._replace(dtype=torch.float32), EFFICIENT, "not in float32"),
    (CUDNN, HOPPER, CAUSAL._replace(dtype=torch.float64), MATH, "not in float64"),
    (CUDNN, HOPPER, CAUSAL._replace(head_dim=100, value_dim=100), MATH, "multiple of 8, not 100"),
    (FLASH3, HOPPER, PACKED, FLASH2, "not installed"),
    (FLASH3, WITH_3._replace(torch=(2, 12)), PACKED, FLASH2, "needs torch 2.13, not 2.12"),
    (FLASH3, WITH_3._replace(capability=(8, 0)), PACKED, FLASH2, "not on compute capability 8.0"),
    (FLASH3, WITH_3._replace(capability=(10, 0)), PACKED, FLASH2, "compute capability 10.0"),
    (FLASH3, AMD._replace(flash3=True), PACKED, FLASH2, "runs on Hopper, not on AMD"),
    (FLASH3, WITH_3, PACKED._replace(deterministic=True), FLASH2, "not deterministic"),
    (FLASH3, WITH_3, PACKED._replace(head_dim=264, value_dim=264), EFFICIENT, "most 256, not 264"),
    (FLASH3, WITH_3, PACKED._replace(value_dim=64), EFFICIENT, "values of the same width"),
    (FLASH2, TURING, CAUSAL, MATH, "does not run on compute capability 7.5"),
    (FLASH2, AMPERE, CAUSAL._replace(dtype=torch.float32), EFFICIENT, "in 16 bits"),
    (EFFICIENT, TURING, CAUSAL, MATH, "does not compute in bfloat16"),
    (EFFICIENT, AMPERE, CAUSAL._replace(dtype=torch.float64), MATH, "not compute in float64"),
    (EFFICIENT, AMPERE, CAUSAL._replace(head_dim=100, value_dim=100), MATH, "of 16 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("usual", "device", "call", "chosen", "reason"), RULES)
def test_what_speaks_against_a_kernel(
    usual: Kernel, device: Device, call: Call, chosen: Kernel, reason: str
) -> None:
    choice = choose(device, call)
    assert choice.kernel is chosen
    said = dict(choice.passed_over)
    if usual is CUDNN and call.packed:  # it is not among the kernels for documents
        assert "cuDNN" not in said
    else:
        assert reason in said[usual.name]
    wanted = {CUDNN: "cudnn", FLASH2: "flash2", FLASH3: "flash3"}.get(usual)
    if wanted is not None and "not known to be faster" not in reason:
        with pytest.raises(UserError, match=reason) as refused:
            choose_for_steps(device, call, wanted)
        assert "set model.attention_kernel=auto" in str(refused.value)
        assert choose(device, call, wanted).kernel is chosen  # of a call that no step makes


@pytest.mark.parametrize(
    ("name", "value"), [("OLDEST_CUDNN", 0), ("TILE", 1), ("FAST_CUDNN", ((8, 0), (9, 0)))]
)
def test_a_forgotten_rule_is_found(name: str, value: object) -> None:
    # Plant: a limit of cuDNN is gone; some row of the table then fails.
    choose.cache_clear()
    with patch.object(attention_choice, name, value):
        rows = [row for row in RULES if row[0] is CUDNN]
        assert any(choose(device, call).kernel is not chosen for _, device, call, chosen, _ in rows)
    choose.cache_clear()


def test_a_wanted_kernel() -> None:
    assert choose(HOPPER, CAUSAL, "flash2") == Choice(FLASH2, "", ())
    assert choose(WITH_3, CAUSAL, "flash3") == Choice(FLASH3, "", ())
    assert choose(ADA, CAUSAL, "cudnn").kernel is CUDNN  # right there, if not known to be faster
    for wanted in BY_REQUEST:
        assert choose(CPU, CAUSAL, wanted).kernel is ON_CPU
        with pytest.raises(UserError, match="there is no GPU"):
            choose_for_steps(CPU, CAUSAL, wanted)


@pytest.mark.parametrize("wanted", BY_REQUEST)
@pytest.mark.parametrize("length", [8192, 4160, 32])
def test_no_length_is_refused_in_a_run(
    monkeypatch: pytest.MonkeyPatch, wanted: str, length: int
) -> None:
    """Evaluation pads rows to 32, 64, …: what the wanted kernel cannot compute, another one does.
    torch's flag says nothing. (test_examine.py has an examination, whose results repeat.)"""
    monkeypatch.setattr(attention_choice, "PLANNED", WITH_3)
    positions = torch.empty((length, 1), dtype=torch.int64, device="meta")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with AsOnGpu(), patch.object(attention_choice, "load_flash3") as load:
            mask = make_mask(positions, None, None, torch.bfloat16, 128, wanted)
    finally:
        torch.use_deterministic_algorithms(before)
    flash = "flash3" if load.called else "flash2"
    found = {CUDNN.run: "cudnn", FLASH2.run: flash}[mask.dense]
    assert found == ("flash3" if wanted == "cudnn" and length % 128 else wanted)


# --- the operators --------------------------------------------------------------------------------


def inputs(call: Call, device: str = "meta", length: int = 0) -> list[torch.Tensor]:
    """q [S, 1, 4, E], k and v [S, 1, 2, E]."""
    shapes = [(length or call.length, 1, heads, call.head_dim) for heads in (4, 2, 2)]
    of = {"dtype": call.dtype, "device": device, "requires_grad": True}
    return [torch.randn(shape, **of) for shape in shapes]


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
def test_the_operator_that_runs_is_the_chosen_one(
    monkeypatch: pytest.MonkeyPatch, device: Device, call: Call, chosen: Kernel
) -> None:
    monkeypatch.setattr(attention_choice, "PLANNED", device)
    assert choose(device, call).kernel is chosen
    positions = torch.empty((call.length, 1), dtype=torch.int64, device="meta")
    documents = None
    if call.packed:
        boundaries = torch.empty(3, dtype=torch.int32, device="meta")
        documents = Documents(boundaries, boundaries, (0, 0), (call.length, call.length))
    q, k, v = inputs(call)
    with AsOnGpu(), Operators() as seen:
        mask = make_mask(positions, documents, None, call.dtype, call.head_dim)
        y = mask(q, k, v)
        y.sum().backward()
    assert y.shape == q.shape
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    at = 1 if call.packed and chosen.packs else 0
    assert seen.attention() == list(chosen.operators[at : at + 1])


class Attending(nn.Module):
    """A block that only computes attention."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.mask(q * 2, k, v) * 2


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("mask", "operator"),
    [
        *((Mask(dense=kernel.run), kernel.operators[0]) for kernel in (CUDNN, FLASH2, EFFICIENT)),
        (Mask(True, window=64), FLASH2.operators[1]),
        (Mask(), ON_CPU.operators[0]),
    ],
    ids=["cuDNN", "flash", "efficient", "flash, packed", "flash (CPU)"],
)
def test_selective_recomputation_keeps_the_output(mask: Mask, operator: object, tp: int) -> None:
    on_cpu = operator in ON_CPU.operators

    def runs(kept: frozenset[object]) -> list[object]:
        block = Attending(mask)
        wrap_blocks([block], "selective", False, tp, kept)
        with nullcontext() if on_cpu else AsOnGpu(), Operators() as seen:
            block(*inputs(CAUSAL, "cpu" if on_cpu else "meta", length=128)).sum().backward()
        return seen.attention()

    assert runs(OPERATORS) == [operator]
    assert runs(OPERATORS - {operator}) == [operator] * 2  # control: it runs again in backward


@pytest.mark.parametrize("kernel", [CUDNN, FLASH2, EFFICIENT, MATH], ids=lambda each: each.name)
def test_a_kernel_is_compiled_as_one_graph(kernel: Kernel) -> None:
    mask = Mask(dense=kernel.run)
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(lambda q, k, v: mask(q, k, v), backend=backend, fullgraph=True)
    compiled(*inputs(CAUSAL, length=256)).sum().backward()
    (graph,) = backend.fw_graphs
    assert set(kernel.operators[:1]) <= {node.target for node in graph.graph.nodes}


@pytest.mark.parametrize("run", [ON_CPU.run, MATH.run], ids=["CPU", "math"])
def test_blocks_with_other_numbers_of_heads_are_compiled(run: Dense) -> None:
    """After the first, the compiler makes the numbers of heads symbols."""
    compiled = torch.compile(lambda *qkv: run(*qkv, None), backend="aot_eager", fullgraph=True)
    for heads, shared in ((4, 2), (8, 4), (6, 3)):
        q, k, v = (torch.randn(2, n, 16, 8, requires_grad=True) for n in (heads, shared, shared))
        compiled(q, k, v).sum().backward()
        assert q.grad is not None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_cpu_computes_as_before(dtype: torch.dtype, biased: bool) -> None:
    """The CPU's operator is the one that the start names, and its bits are those of torch's
    `scaled_dot_product_attention`; math agrees with it to rounding."""
    call = CAUSAL._replace(dtype=dtype, head_dim=16, value_dim=16, length=24, packed=biased)
    positions = torch.arange(24).unsqueeze(1)
    q, k, v = (t.detach() for t in inputs(call, "cpu"))
    bias = scores_bias(positions, dtype, 3) if biased else None
    mask = make_mask(positions, None, 3 if biased else None, dtype, 16)
    with Operators() as seen:
        y = mask(q, k, v)
    assert set(ON_CPU.operators) <= set(seen.found)
    q, k, v, y = (t.permute(1, 2, 0, 3) for t in (q, k, v, y))  # heads first
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=not biased, enable_gqa=True
    )
    assert torch.equal(y, expected)
    assert torch.equal(y, by_torch(q, k, v, bias))
    assert (by_math(q, k, v, bias) - expected).abs().max() < 8 * torch.finfo(dtype).eps
    another = None if biased else scores_bias(positions, dtype, 3)
    assert (by_math(q, k, v, another) - expected).abs().max() > 0.1  # control: another mask


@pytest.mark.parametrize("packed", [False, True], ids=["bias", "packed"])
def test_a_query_sees_the_nearest_keys_of_its_window(packed: bool) -> None:
    """A window of 3: itself and the two before it; later and farther keys change nothing."""
    length, window = 8, 3
    q, k, v = (torch.randn(length, 1, 2, 4, dtype=torch.float64) for _ in range(3))
    with flash_attention_stands_in() if packed else nullcontext():
        mask = make_mask(torch.arange(length).unsqueeze(1), None, window, torch.float64, 4)
        y = mask(q, k, v)
    assert mask.packed == packed
    for query in range(length):
        seen = slice(max(0, query + 1 - window), query + 1)
        scores = torch.einsum("bhe,jbhe->bhj", q[query], k[seen]) / 2  # √E
        expected = torch.einsum("bhj,jbhe->bhe", scores.softmax(-1), v[seen])
        torch.testing.assert_close(y[query], expected)


# --- flash 3 --------------------------------------------------------------------------------------


def test_flash_3_is_loaded_where_it_is_chosen_and_only_there() -> None:
    with patch.object(attention_choice, "load_flash3") as load:
        assert made_ready(choose(WITH_3, CAUSAL)) is CUDNN
        assert made_ready(choose(HOPPER, PACKED)) is FLASH2
        assert not load.called
        assert made_ready(choose(WITH_3, PACKED)) is FLASH3
        assert load.called
    broken = ImportError("libcudart.so.13: cannot open")
    with (
        patch.object(attention_choice, "load_flash3", side_effect=broken),
        pytest.raises(UserError, match="libcudart") as refused,
    ):
        made_ready(choose(WITH_3, PACKED))
    assert "model.attention_kernel=flash2" in str(refused.value)


# A package that defines flash 3's operators. torch then registers its own functions for CUDA.
REGISTERS = """
import sys, types, torch
from torch.nn.attention import current_flash_attention_impl
from model.kernels.attention import load_flash3
library = torch.library.Library("flash_attn_3", "DEF")
if sys.argv[1] == "whole":
    library.define("fwd(Tensor q) -> Tensor")
    library.define("bwd(Tensor q) -> Tensor")
sys.modules["flash_attn_interface"] = types.ModuleType("flash_attn_interface")
assert current_flash_attention_impl() is None
load_flash3()
load_flash3()
print(current_flash_attention_impl())
"""


@pytest.mark.skipif(
    attention_choice._torch_release() < (2, 13), reason="before torch 2.13 it is not used"
)
@pytest.mark.thorough  # two processes
@pytest.mark.parametrize("package", ["whole", "empty"])
def test_torch_registers_flash_3(package: str) -> None:
    command = [sys.executable, "-c", REGISTERS, package]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if package == "whole":
        assert done.stdout == "FA3\n", done.stderr
    else:  # control; `made_ready` turns it into a message
        assert "RuntimeError" in done.stderr
