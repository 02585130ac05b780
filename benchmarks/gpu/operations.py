"""The operations that a GPU benchmark compares: inputs, implementations, exact results, and the
bytes that must move.

There are four implementations: `triton` is ours; `torch` is eager PyTorch; `compile` is the same
with torch.compile in its default mode, for these shapes; `liger` is Liger-Kernel, if it is
installed. Each call gets a new copy of the same inputs, because some implementations overwrite
them. The gradients of the outputs are dense (the gradient of a sum would be one expanded number,
which needs no reading).

Bytes are those in the table of each kernel's file, times the number of elements, in bfloat16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.timing import DEVICE, ON_GPU, Work, compiled
from model.kernels.cross_entropy import Normaliser, gradient_over_logits_, token_losses
from model.kernels.rms_norm import add_rms_norm, rms_norm
from model.kernels.rotary import rotate
from model.kernels.swiglu import swiglu
from model.linear_cross_entropy import normaliser
from model.positions import Rotary, rotary_angles
from parallel.collectives import ONE_RANK

EPS = 1e-5
EVERY = ("triton", "torch", "compile", "liger")
Function = Callable[..., tuple[Tensor, ...]]


class Subject(Protocol):
    """The tensors of a case, on the device."""

    def work(self, implementation: str, name_of_pass: str) -> Work: ...


class Case(NamedTuple):
    """An operation to check and to time; nothing is allocated before `build`."""

    name: str
    shape: str
    # bytes that each must move; None: it is not memory that limits it
    passes: Mapping[str, float | None]
    build: Callable[[], Subject]
    implementations: tuple[str, ...] = EVERY


@dataclass(frozen=True)
class Sizes:
    """The sizes of the cases. Letters are those of model/config.py."""

    widths: tuple[int, ...]  # D of the norms
    norm_tokens: int  # T for the first width; fewer for wider ones
    rotary_tokens: int
    heads: tuple[int, int, int]  # H, K, E
    swiglu_shape: tuple[int, int]  # T, F
    logits_shape: tuple[int, int]  # T, V
    head_shape: tuple[int, int, int]  # T, D, V
    layers: int  # number of layers whose parameters the optimizer updates
    copy_bytes: int
    product: int  # of two square matrices of this width


# Each tensor is at least a quarter of a GB, so that a call takes much longer than its launch.
FULL = Sizes((4096, 8192), 65536, 49152, (32, 8, 128), (16384, 14336), (8192, 128256),
             (8192, 4096, 128256), 4, 2 << 30, 8192)  # fmt: skip
TINY = Sizes((64, 96), 6, 5, (4, 2, 8), (3, 100), (4, 300), (8, 24, 200), 1, 1 << 16, 64)
SIZES = FULL if ON_GPU else TINY


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype) * scale


def liger() -> Any:
    from liger_kernel.transformers import functional

    return functional


@dataclass
class Operation:
    """An operation with a backward.

    inputs: all are differentiated.
    directions: the gradients of the outputs.
    exact: takes the inputs in float64; returns a tuple, like the others.
    function: takes the inputs and `kernels`, which is triton or torch.
    by_liger: takes Liger's functions and the inputs.
    plain: eager PyTorch, if that is not `function` with kernels=torch.
    """

    inputs: list[Tensor]
    directions: list[Tensor]
    exact: Function
    function: Function
    by_liger: Function
    plain: Function | None = None

    def __post_init__(self) -> None:
        self.plain = self.plain or (lambda *x: self.function(*x, "torch"))
        self.of_compiler = compiled(self.plain)

    def implementation(self, name: str) -> Function:
        if name == "liger":
            functions = liger()
            return lambda *x: self.by_liger(functions, *x)
        if name == "triton":
            return lambda *x: self.function(*x, "triton")
        return {"torch": self.plain, "compile": self.of_compiler}[name]

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in self.inputs]

    def work(self, implementation: str, name_of_pass: str) -> Work:
        function = self.implementation(implementation)
        if name_of_pass == "forward":
            return Work(self.leaves, lambda leaves: function(*leaves))

        def prepare() -> tuple:
            leaves = self.leaves()
            return function(*leaves), leaves, [d.clone() for d in self.directions]

        return Work(prepare, lambda state: torch.autograd.grad(*state))


# --- the operations -------------------------------------------------------------------------------


def _exact_norm(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w,)


def norm_case(tokens: int, width: int) -> Case:
    def build() -> Operation:
        return Operation(
            [draw(tokens, width), draw(width)],
            [draw(tokens, width)],
            _exact_norm,
            lambda x, w, kernels: (rms_norm(x, w, EPS, kernels),),
            lambda functions, x, w: (functions.liger_rms_norm(x, w, EPS),),
        )

    n, shape = tokens * width, f"T {tokens}, D {width}"
    return Case(f"rms_norm {width}", shape, {"forward": 4.0 * n, "backward": 6.0 * n}, build)


def add_norm_case(tokens: int, width: int) -> Case:
    def exact(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = x + r
        rounded = s + (s.bfloat16().double() - s).detach()  # the stored, rounded sum is normalised
        return *_exact_norm(rounded, w), s

    def build() -> Operation:
        return Operation(
            [draw(tokens, width), draw(tokens, width), draw(width)],
            [draw(tokens, width), draw(tokens, width)],
            exact,
            lambda x, r, w, kernels: add_rms_norm(x, r, w, EPS, kernels),
            lambda functions, x, r, w: functions.liger_fused_add_rms_norm(x, r, w, EPS),
        )

    n, shape = tokens * width, f"T {tokens}, D {width}"
    return Case(f"add_rms_norm {width}", shape, {"forward": 8.0 * n, "backward": 8.0 * n}, build)


def rotary_case(tokens: int, heads: tuple[int, int, int]) -> Case:
    q_heads, k_heads, width = heads

    def build() -> Operation:
        positions = torch.arange(tokens, device=DEVICE).unsqueeze(1)
        cos, sin = rotary_angles(positions, Rotary(width, 500000.0), torch.bfloat16)
        both_halves = [torch.cat((t, t), dim=-1).view(1, tokens, width) for t in (cos, sin)]

        def exact(*heads: Tensor) -> tuple[Tensor, ...]:
            pairs = [x.chunk(2, dim=-1) for x in heads]
            c, s = cos.double(), sin.double()
            return tuple(torch.cat((a * c - b * s, b * c + a * s), dim=-1) for a, b in pairs)

        def by_liger(functions: Any, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
            """Liger takes [B, H, S, E] views of the same memory, and angles for both halves of a
            head."""
            views = (x.transpose(0, 1).transpose(1, 2) for x in (q, k))
            turned = functions.liger_rope(*views, *both_halves)
            return tuple(y.transpose(1, 2).transpose(0, 1) for y in turned)

        shapes = [(tokens, 1, q_heads, width), (tokens, 1, k_heads, width)]
        return Operation(
            [draw(*shape) for shape in shapes],
            [draw(*shape) for shape in shapes],
            exact,
            lambda q, k, kernels: rotate(q, k, cos, sin, kernels),
            by_liger,
        )

    n = tokens * (q_heads + k_heads) * width
    moved = (4 + 4 / (q_heads + k_heads)) * n
    shape = f"T {tokens}, H {q_heads}, K {k_heads}, E {width}"
    return Case("rotary", shape, {"forward": moved, "backward": moved}, build)


def swiglu_case(tokens: int, width: int) -> Case:
    def build() -> Operation:
        return Operation(
            [draw(tokens, width, scale=3.0), draw(tokens, width)],
            [draw(tokens, width)],
            lambda g, u: (g * torch.sigmoid(g) * u,),
            lambda g, u, kernels: (swiglu(g, u, kernels),),
            lambda functions, g, u: (functions.liger_swiglu(g, u),),
        )

    n, shape = tokens * width, f"T {tokens}, F {width}"
    return Case(f"swiglu {width}", shape, {"forward": 6.0 * n, "backward": 10.0 * n}, build)


class Loss(torch.autograd.Function):
    """The summed loss of logits [T, V] by the kernels; the gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, kernels: str) -> Tensor:
        row = normaliser(logits, targets, 0, ONE_RANK, kernels)
        ctx.save_for_backward(logits, targets, *row)
        ctx.kernels = kernels
        return token_losses(row, targets, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, *row = ctx.saved_tensors
        gradient = logits.detach()
        gradient_over_logits_(gradient, targets, Normaliser(*row), dloss, 0, 0.0, ctx.kernels)
        return gradient, None, None


def loss_case(tokens: int, vocab: int) -> Case:
    """The loss. Liger's forward computes the gradient too, so only the sum of both passes can be
    compared."""

    def build() -> Operation:
        targets = torch.randint(vocab, (tokens,), device=DEVICE)
        return Operation(
            [draw(tokens, vocab, scale=3.0)],
            [torch.ones((), device=DEVICE)],
            lambda z: (F.cross_entropy(z, targets, reduction="sum"),),
            lambda z, kernels: (Loss.apply(z, targets, kernels),),
            lambda functions, z: (functions.liger_cross_entropy(z, targets, reduction="sum"),),
            plain=lambda z: (F.cross_entropy(z.float(), targets, reduction="sum"),),
        )

    n = tokens * vocab
    passes = {"forward": (2 + 20 / vocab) * n, "backward": 4.0 * n}
    return Case("cross_entropy", f"T {tokens}, V {vocab}", passes, build)
