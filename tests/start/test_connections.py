"""CUDA_DEVICE_MAX_CONNECTIONS: chosen by the layout, set before CUDA is used, and the user's value
comes first."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

import train
from errors import UserError
from parallel.config import ParallelConfig
from runtime.device import CUBLAS
from runtime.signals import Signals
from runtime.start.announce import notices
from runtime.start.checks import try_config
from runtime.start.host import CONNECTIONS, advised_connections, connections_notice
from settings.load import load_config
from tests import ROOT

CONFIG = str(ROOT / "configs/llama3_70b.yaml")  # tp 4, zero_stage 1
ALONE = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1"]


@pytest.mark.parametrize(
    ("layout", "advised"),
    [
        ({"tp": 2, "zero_stage": 0}, 1),
        ({"tp": 8, "pp": 4, "dp_shard": 8, "zero_stage": 1}, 1),
        ({"tp": 8, "dp_shard": 8, "zero_stage": 2}, 32),  # reduces in each layer
        ({"tp": 8, "dp_shard": 8, "zero_stage": 3}, 32),  # and gathers there too
        ({"dp_shard": 8, "zero_stage": 3}, 32),
        ({"pp": 4}, 32),
        ({}, 32),
    ],
    ids=str,
)
def test_the_layout_decides(layout: dict[str, int], advised: int) -> None:
    assert advised_connections(ParallelConfig(**layout)) == advised


class CudaTouched(BaseException):
    """Raised at the first use of CUDA; its argument is the variable's value then."""


def value_at_first_use(arguments: list[str]) -> str | None:
    """The variable's value when train.py's main function first uses CUDA."""

    def touched() -> bool:
        raise CudaTouched(os.environ.get(CONNECTIONS))

    with patch.object(torch.cuda, "is_available", touched), pytest.raises(CudaTouched) as raised:
        train.main(arguments, Signals(speaks=False))
    return raised.value.args[0]


def test_it_is_set_before_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS, "")  # so that it is restored
    for overrides, value in (
        ([], "1"),
        (["parallel.zero_stage=3"], "32"),
        (["parallel.tp=1"], "32"),
    ):
        del os.environ[CONNECTIONS]
        assert value_at_first_use([CONFIG, *overrides]) == value
    monkeypatch.setenv(CONNECTIONS, "8")
    assert value_at_first_use([CONFIG]) == "8", "the user's value"
    for wrong in ([], ["/nowhere"], [CONFIG, "parallel.tp=x"]):  # one rank reports it later
        del os.environ[CONNECTIONS]
        assert value_at_first_use(wrong) is None
        monkeypatch.setenv(CONNECTIONS, "")
    del os.environ[CONNECTIONS]
    with patch.object(train, "set_connections"):  # control
        assert value_at_first_use([CONFIG]) is None


@pytest.mark.parametrize("given", [None, ":4096:2:16:8"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_cublas_is_prepared_before_attention_is_tried(
    monkeypatch: pytest.MonkeyPatch, given: str | None, deterministic: bool
) -> None:
    """cuBLAS reads its variable at its first product, and flash attention's backward is
    deterministic only under torch's flag. A value with which neither holds is refused."""
    flag = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(CUBLAS, given or "")
    if given is None:
        del os.environ[CUBLAS]
    found = []

    def tried(*_: object) -> None:
        found.append((os.environ[CUBLAS], torch.are_deterministic_algorithms_enabled()))
        raise KeyboardInterrupt

    overrides = [f"train.deterministic={str(deterministic).lower()}", *ALONE]
    monkeypatch.setattr(train, "check_kernels", lambda *_: None)
    monkeypatch.setattr(train, "check_attention", tried)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    refused = bool(given) and deterministic
    try:
        with pytest.raises(UserError if refused else KeyboardInterrupt) as raised:
            train.check_config(try_config([str(ROOT / "configs/laptop.yaml"), *overrides]), "cuda")
    finally:
        torch.use_deterministic_algorithms(flag)
    if refused:
        assert (raised.value.key, raised.value.value) == (CUBLAS, given)
    else:
        assert found == [(given or ":4096:8", deterministic)]


def test_no_import_uses_cuda() -> None:
    """`import train` does not initialize CUDA, which would read the variable too early."""
    program = """
import torch
names = ["is_available", "device_count", "_lazy_init", "current_device", "get_device_properties"]
used = []
for name in names:
    setattr(torch.cuda, name, lambda *_, name=name: used.append(name))
import train
print(used)
torch.cuda.is_available()
print(used)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["[]", "['is_available']"], done.stderr


def test_a_value_that_is_not_advised_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(CONFIG, [])
    for value, is_named in ((None, False), ("1", False), ("8", True)):
        monkeypatch.delenv(CONNECTIONS, raising=False)
        if value is not None:
            monkeypatch.setenv(CONNECTIONS, value)
        lines = connections_notice(config.parallel)
        assert bool(lines) == is_named
        assert [line for line in notices(config, None, "cuda", 2**20) if line in lines] == lines
    assert "is 8, as it was set" in lines[0]
    assert "1 is usually faster" in lines[0]
    assert not set(lines) & set(notices(config, None, "cpu", 2**20))
