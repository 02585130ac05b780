"""Training on the GPU compared with training on the CPU: every mechanism that one GPU can run.

For each, a small model is trained for two steps on the GPU, with our kernels, and the loss, the
gradient norm, the gradient of every parameter and, in float64, every updated weight are compared
with those of plain training on the CPU, with PyTorch's operations (reference.py, in another
process, which needs no GPU). Errors are those of whole tensors, ‖found − exact‖ / ‖exact‖.

    float64    at most 1e-9
    bfloat16   compared with the CPU's float64 results; at most twice the error of the CPU's own
               bfloat16 results, plus 2⁻⁸

The second is the only one that runs the kernels of 16-bit numbers: flash attention, documents,
products that sum in float32.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu.timing import ON_GPU
from tests.gpu.checks import wrong
from tests.gpu.reference import EXACT, MECHANISMS, ROUNDED, Mechanism, compare, file_of, train

WAIT_SECONDS = 120  # for the CPU's numbers
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

Reference = Callable[[str, str], dict[str, Tensor]]


@pytest.fixture(scope="module")
def cpu(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """Starts the CPU's runs, for the tests that are asked for; gives a function that waits for the
    numbers of a mathematics in a dtype."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    mechanisms = [each.params["mechanism"] for each in asked if each and "mechanism" in each.params]
    names = dict.fromkeys(mechanism.mathematics for mechanism in mechanisms)
    folder = tmp_path_factory.mktemp("cpu")
    size = "full" if ON_GPU else "tiny"  # which a process without the GPU cannot know
    command = [sys.executable, "-m", "tests.gpu.reference", str(folder), size, *names]
    process = subprocess.Popen(command, env={**os.environ, **WITHOUT_GPU})

    def of(mathematics: str, kind: str) -> dict[str, Tensor]:
        end, path = time.monotonic() + WAIT_SECONDS, file_of(folder, mathematics, kind)
        while not path.exists():
            assert process.poll() is None or path.exists(), "the CPU's run failed"
            if time.monotonic() > end:
                pytest.skip(f"the CPU took more than {WAIT_SECONDS} s")
            time.sleep(0.05)
        return load_file(path)

    yield of
    process.kill()
    process.wait()


@pytest.mark.gpu
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("mechanism", "kind"),
    [
        pytest.param(mechanism, kind, id=f"{mechanism.name}, {kind}")
        for mechanism in MECHANISMS
        for kind in mechanism.kinds
    ],
)
def test_training_is_that_of_the_cpu(
    mechanism: Mechanism, kind: str, cpu: Reference, record: Any
) -> None:
    found = train(mechanism, kind, kernels="triton")
    exact = cpu(mechanism.mathematics, EXACT)
    rounded = cpu(mechanism.mathematics, ROUNDED) if kind == ROUNDED else None
    checks = compare(found, exact, rounded)
    worst = max(checks, key=lambda check: check.error / check.bound)
    record({"compared": len(checks), "worst": worst._asdict(), "loss": found["loss"].item()})
    assert wrong(checks) == []


def test_a_wrong_tensor_is_found_in_every_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = {"gradient of w": torch.randn(100, generator=generator, dtype=torch.float64)}
    rounded = {name: tensor.bfloat16() for name, tensor in exact.items()}
    for factor, same in ((1 + 1e-10, True), (1 + 1e-8, False), (float("nan"), False)):
        (check,) = compare({k: t * factor for k, t in exact.items()}, exact, None)
        assert check.passed is same
    for factor, same in ((1.0, True), (1.05, False)):
        found = {name: tensor * factor for name, tensor in rounded.items()}
        (check,) = compare(found, exact, rounded)
        assert check.passed is same
    with pytest.raises(AssertionError, match="there is no gradient of w"):
        compare({}, exact, None)


@pytest.mark.thorough
@pytest.mark.usefixtures("world")
def test_a_gradient_that_is_slightly_wrong_is_found() -> None:
    """One mechanism at tiny size, right and wrong."""
    (mechanism,) = (each for each in MECHANISMS if each.name == "qk_norm")
    found, exact = (train(mechanism, EXACT, kernels) for kernels in ("triton", "torch"))
    assert wrong(compare(found, exact, None)) == []
    name = "gradient of blocks.1.attention.key.weight"
    found[name] *= 1.0 + 1e-7
    assert [check.what for check in wrong(compare(found, exact, None))] == [name]
