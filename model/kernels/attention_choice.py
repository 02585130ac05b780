"""Which kernel computes attention (attention.py), and why.

On a GPU, the first kernel in the row of the mask runs that nothing in the second table rules out:

| mask                            | kernels, best first                          |
|---------------------------------|----------------------------------------------|
| causal                          | cuDNN, flash 3, flash 2, efficient, math     |
| documents, windows              | flash 3, flash 2; efficient, math with a bias |

| kernel    | what speaks against it                                                              |
|-----------|-------------------------------------------------------------------------------------|
| cuDNN     | GPUs other than Hopper and Blackwell, where it is not faster (1)                    |
|           | before 9.15.1: reads beyond the keys if S is not a multiple of 128 (2)              |
|           | S not a multiple of 128: NaN in gradients from the last tile of keys (3)            |
|           | documents and windows: torch's operator for them does not call it (up to 2.13)      |
|           | train.deterministic: torch does not use cuDNN's deterministic backward (4)          |
|           | not 16 bits; heads wider than 128 or not a multiple of 8                            |
| flash 3   | not installed; GPUs other than Hopper; torch before 2.13, whose registration we do  |
|           | not know to have a backward in 16 bits (at first it had none: 5)                    |
|           | train.deterministic: its backward gave different bits in spite of the option (6)    |
|           | not 16 bits; heads wider than 256 or not a multiple of 8                            |
| flash 2   | not 16 bits; heads wider than 256 or not a multiple of 8; before Ampere; heads of   |
|           | 193 to 224 on other GPUs than A100, Hopper and Blackwell's large ones (7)           |
| efficient | float64; heads whose rows are not a multiple of 16 bytes; 16 bits before Ampere     |
| math      | nothing, but it keeps S × S scores                                                  |

1. H100, causal, heads of 128, S = 8192, in TFLOP/s forward and backward: cuDNN 566 and 470, flash 2
   306 and 166, flash 3 660 and 575, published with flash 3
   (https://github.com/Dao-AILab/flash-attention/pull/1893). A100: cuDNN 69, flash 2 79, both passes
   (https://github.com/pytorch/pytorch/pull/192799). flash 3 comes second because torch calls its
   registration a prototype; `model.attention_kernel=flash3` puts it first.
2. https://github.com/pytorch/pytorch/issues/169849; torch's own order has the same limit.
3. https://github.com/pytorch/pytorch/issues/196678: found with a bias and S % 128 = 64; a causal
   mask alone hides those keys. No length that leaves a partial tile is used here, and no bias.
4. https://github.com/pytorch/pytorch/pull/182551
5. https://github.com/pytorch/pytorch/pull/172040
6. https://github.com/Dao-AILab/flash-attention/issues/2244
7. `mha_bwd` of torch's flash_api.cpp refuses them
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from errors import UserError
from model.kernels.attention import (
    CUDNN,
    EFFICIENT,
    FLASH2,
    FLASH3,
    MATH,
    ON_CPU,
    Kernel,
    load_flash3,
    unload_flash3,
)

KEY = "model.attention_kernel"
BY_REQUEST = {"cudnn": CUDNN, "flash2": FLASH2, "flash3": FLASH3}  # the values other than auto
FAST_CUDNN = ((9, 0), (10, 0), (10, 3))  # compute capabilities
OLDEST_CUDNN = 91501
TILE = 128  # keys at once, in cuDNN's backward
HALF = (torch.bfloat16, torch.float16)


class Device(NamedTuple):
    """What the choice depends on in the machine and its packages. For a CPU, only `capability` is
    read."""

    capability: tuple[int, int] | None  # compute capability; None: a CPU
    cudnn: int | None = None  # 91501 is 9.15.1; None: not there
    torch: tuple[int, int] = (2, 13)
    flash3: bool = False  # the package is installed
    amd: bool = False


CPU = Device(None)
# For tensors without data (costs/as_on_gpu.py): an H100 with pip's torch 2.13, and no flash 3
PLANNED = Device((9, 0), 92000)


class Call(NamedTuple):
    """What the choice depends on in the model and the run. Fewer key/value heads than query heads
    make no difference: where a kernel does not take them, they are repeated."""

    dtype: torch.dtype
    head_dim: int  # E
    length: int  # S
    packed: bool  # with documents or a window, or of queries that do not begin the sequence
    deterministic: bool  # its backward must give the same bits every time


@dataclass(frozen=True)
class Choice:
    kernel: Kernel
    version: str  # of the kernel, where there are several
    passed_over: tuple[tuple[str, str], ...]  # (name, reason) of the kernels that come before it

    def __str__(self) -> str:
        why = "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over)
        return self.kernel.name + self.version + (f" ({why})" if why else "")


@lru_cache(maxsize=256)
def choose(device: Device, call: Call, wanted: str = "auto") -> Choice:
    """The kernel for this call on this device: the wanted one (`model.attention_kernel`) or, if it
    cannot compute this call, the best that can. A run also makes calls that are not those of its
    steps: evaluation has shorter rows, and an examination needs results that repeat."""
    first = [BY_REQUEST[wanted]] if wanted != "auto" else []
    others = [FLASH3, FLASH2, EFFICIENT] if call.packed else [CUDNN, FLASH3, FLASH2, EFFICIENT]
    if device.capability is None:
        others = []
    passed_over: dict[str, str] = {}
    for kernel in (*first, *others):
        reasons = [*_impossible(kernel, device, call)]
        slow_cudnn = kernel is CUDNN and not device.amd and device.capability not in FAST_CUDNN
        if slow_cudnn and kernel not in first:
            reasons.insert(0, f"not known to be faster on {_gpu(device)}")
        if not reasons:
            version = f" {_dotted(device.cudnn)}" if kernel is CUDNN and device.cudnn else ""
            return Choice(kernel, version, tuple(passed_over.items()))
        passed_over.setdefault(kernel.name, reasons[0])
    last = ON_CPU if device.capability is None else MATH
    return Choice(last, "", tuple(passed_over.items()))


def choose_for_steps(device: Device, call: Call, wanted: str) -> Choice:
    """`choose`, for a call that every step makes. Raises UserError if the wanted kernel cannot
    compute it."""
    choice = choose(device, call, wanted)
    if wanted != "auto" and choice.kernel is not BY_REQUEST[wanted]:
        raise UserError(KEY, wanted, choice.passed_over[0][1], f"set {KEY}=auto")
    return choice


def _dotted(cudnn: int) -> str:
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


def _impossible(kernel: Kernel, device: Device, call: Call) -> Iterator[str]:
    """Reasons for which a kernel cannot run, or must not."""
    if device.capability is None:
        yield "there is no GPU"
        return
    if kernel is EFFICIENT:
        before_ampere = device.capability < (8, 0)
        if call.dtype not in ((torch.float32,) if before_ampere else (*HALF, torch.float32)):
            yield f"does not compute in {_short(call.dtype)} on {_gpu(device)}"
        if call.head_dim * call.dtype.itemsize % 16:
            yield f"heads of {call.head_dim} are not a multiple of 16 bytes"
        return
    if call.dtype not in HALF:
        yield f"computes in 16 bits, not in {_short(call.dtype)}"
    widest = 128 if kernel is CUDNN else 256
    if call.head_dim > widest:
        yield f"takes heads of at most {widest}, not {call.head_dim}"
    if call.head_dim % 8:
        yield f"takes heads of a multiple of 8, not {call.head_dim}"
    if kernel is CUDNN:
        yield from _cudnn_impossible(device, call)
        return
    if kernel is FLASH2 and device.capability < (8, 0):
        yield f"does not run on {_gpu(device)}"
    large = device.amd or device.capability in ((8, 0), *FAST_CUDNN)  # in shared memory (7)
    if kernel is FLASH2 and not large and 192 < call.head_dim <= 224:
        yield f"its backward takes no heads of {call.head_dim} on {_gpu(device)}"
    if kernel is FLASH3:
        if device.amd or device.capability != (9, 0):
            yield f"runs on Hopper, not on {_gpu(device)}"
        if device.torch < (2, 13):
            yield f"needs torch 2.13, not {device.torch[0]}.{device.torch[1]}"
        if not device.flash3:
            yield "not installed"
        if call.deterministic:
            yield "its backward is not deterministic"


def _cudnn_impossible(device: Device, call: Call) -> Iterator[str]:
    if device.amd or device.cudnn is None:
        yield "there is no cuDNN"
    elif device.cudnn < OLDEST_CUDNN:
        yield f"{_dotted(device.cudnn)} is older than {_dotted(OLDEST_CUDNN)}"
    if device.capability is not None and device.capability < (8, 0):
        yield f"does not run on {_gpu(device)}"
    if call.packed:
        yield "takes no documents, windows or later chunks"
    if call.length % TILE:
        yield f"takes sequences of a multiple of {TILE} tokens, not {call.length}"
    if call.deterministic:
        yield "its backward is not deterministic"


def _gpu(device: Device) -> str:
    assert device.capability is not None
    return "AMD" if device.amd else "compute capability {}.{}".format(*device.capability)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_of(tensor: Tensor) -> Device:
    """The device of a tensor: this machine's, or the planned one."""
    if not tensor.is_cuda:
        return CPU
    return this_device("cuda") if tensor.device.type == "cuda" else PLANNED


@cache
def this_device(device_type: str) -> Device:
    """This machine as `Device`, for a run on "cpu" or on "cuda"."""
    if device_type == "cpu":
        return CPU
    major, minor = torch.__version__.split(".")[:2]
    return Device(
        capability=torch.cuda.get_device_capability(),
        cudnn=None if torch.version.hip else torch.backends.cudnn.version(),
        torch=(int(major), int(minor)),
        flash3=importlib.util.find_spec("flash_attn_interface") is not None,
        amd=torch.version.hip is not None,
    )


def made_ready(choice: Choice) -> Kernel:
    """The kernel of a choice, ready to run in this process. Raises UserError if it does not
    load."""
    if choice.kernel is FLASH3:
        try:
            load_flash3()
        except (ImportError, RuntimeError) as error:
            why = f"flash 3 is installed, but torch cannot load it ({error})"
            remedy = f"repair or remove the package flash_attn_interface, or set {KEY}=flash2"
            raise UserError(KEY, "flash 3", why, remedy) from None
    elif choice.kernel is FLASH2:  # the same operators: an examination must not run flash 3
        unload_flash3()
    return choice.kernel
