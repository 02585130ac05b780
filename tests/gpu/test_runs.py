"""One process on a GPU: the kernels of attention agree with masks, a trace has every action, and a
step never waits for the device."""

import json
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.documents import find_documents
from model.kernels.attention import KERNELS, MATH, Kernel
from model.kernels.attention_choice import Call, choose, device_of
from model.mask import Mask, make_mask, scores_bias
from parallel.pipeline.schedules import build_schedule
from tests import ROOT
from tests.data_samples import prepared
from tests.gpu.bench import train
from tests.runs import write_config
from tools.timeline.panels import from_chrome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_trace_has_the_times_of_every_action(tmp_path: Path) -> None:
    """In order, with the schedule zb_v and two stages on one GPU."""
    sections: dict[str, Any] = {
        "train": {"dtype": "bfloat16"},
        "run": {"trace": True},
        "parallel": {"schedule": "zb_v", "stages_per_rank": 2, "zero_stage": 2},
    }
    train(tmp_path / "zb_v", prepared(tmp_path / "data"), **sections)
    timeline = from_chrome(json.loads((tmp_path / "zb_v" / "run" / "trace.json").read_text()))
    # 8 sequences, 2 at a time
    assert [event.action for event in timeline.ranks[0]] == build_schedule("zb_v", 1, 2, 4)[0]
    assert all(a.end <= b.start + 1e-3 for a, b in pairwise(timeline.ranks[0]))


def results(given: list[Tensor], weights: Tensor, mask: Mask, dtype: torch.dtype) -> list[Tensor]:
    """The output of attention, and the gradients of its weighted sum over q, k and v."""
    inputs = [t.to(dtype).requires_grad_() for t in given]
    y = mask(*inputs)
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


@pytest.mark.parametrize("seen", ["causal", "window", "documents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_chosen_attention_kernel_runs(dtype: torch.dtype, seen: str) -> None:
    """The profiler sees the operators of the chosen kernel and of no other; outputs and gradients
    are those of math in float32, and not those of another mask."""
    length, head_dim, window = 512, 64, 100 if seen == "window" else None
    positions, documents = torch.arange(length, device="cuda").unsqueeze(1), None
    other = scores_bias(positions, torch.float32, 10)
    torch.manual_seed(0)
    if seen == "documents":  # one begins at each 1, which is about every hundredth token
        tokens = torch.randint(0, 100, (2, length))
        positions, (documents,) = find_documents(tokens, 1, "cuda", [range(length)])
    packed = seen != "causal"
    call = Call(dtype, head_dim, length, packed, deterministic=False)
    choice = choose(device_of(positions), call)
    mask = make_mask(positions, documents, window, dtype, head_dim)
    *given, weights = (
        torch.randn(length, 2, heads, head_dim, device="cuda", dtype=dtype)
        for heads in (8, 2, 2, 8)
    )
    outputs = partial(results, given, weights)
    with torch.profiler.profile() as profile:
        ours = outputs(mask, dtype)
    ran = {event.key for event in profile.key_averages()}
    assert names(choice.kernel, packed) <= ran, (str(choice), ran)
    others = {name for kernel in KERNELS for name in names(kernel, packed)}
    assert not ran & (others - names(choice.kernel, packed)), (str(choice), ran)

    bias = scores_bias(positions, torch.float32, window)
    expected = outputs(Mask(bias=bias, dense=MATH.run), torch.float32)
    wrong = outputs(Mask(bias=other, dense=MATH.run), torch.float32)
    for each, right, control in zip(ours, expected, wrong, strict=True):
        assert each.shape == right.shape
        # bfloat16 has rounding errors of 2**-9 in the inputs' products, the weights and the sums
        assert (each.float() - right).norm() < 0.02 * right.norm()
        assert (control - right).norm() > 0.1 * right.norm()


def names(kernel: Kernel, packed: bool) -> set[str]:
    """What a profile calls the kernel's operator."""
    operators = kernel.operators[1 if packed and kernel.packs else 0 :][:1]
    return {operator.name().removesuffix(".default") for operator in operators}


STEPS_WITHOUT_WAITING = """
import sys
import torch
from proofs.parity.run import make_step
from settings.checks import validate
from settings.load import load_config
from runtime.start.init import init_distributed

init_distributed()
config = load_config(sys.argv[1], sys.argv[2:])
validate(config, 1)
train = make_step(config, "cuda")
shape = config.train.global_batch_size, config.train.seq_len
tokens = torch.randint(config.model.vocab_size, shape)
train(0, tokens, tokens)  # compiles kernels, makes memory
torch.cuda.set_sync_debug_mode("error")
train(1, tokens, tokens)
torch.cuda.set_sync_debug_mode("default")
"""


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_step_never_waits_for_the_device(tmp_path: Path, document_mask: bool) -> None:
    """No part of a step (forward, backward, norm, clipping, update) synchronizes with the device,
    so that the host runs ahead."""
    config = write_config(tmp_path, prepared(tmp_path / "data"), train={"dtype": "bfloat16"})
    masked = f"data.document_mask={document_mask}"
    command = [sys.executable, "-c", STEPS_WITHOUT_WAITING, config, masked]
    subprocess.run(command, cwd=ROOT, check=True)
