"""CUDA_DEVICE_MAX_CONNECTIONS: chosen by the layout, set before CUDA is used, and the user's value
comes first."""

import importlib
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import train
from errors import UserError
from runtime.device import CUBLAS
from runtime.signals import Signals
from runtime.start import checks
from runtime.start.checks import try_config
from runtime.start.host import CONNECTIONS
from tests import ROOT
from tests.runs import forked, status

CONFIG = str(ROOT / "configs/llama3_70b.yaml")  # tp 4, zero_stage 1


class CudaTouched(BaseException):
    """Raised at the first use of CUDA; its argument is the variable's value then."""


def value_at_first_use(*arguments: str, given: str | None = None) -> str | None:
    """The variable's value when train.py's main function first uses CUDA."""

    def touched() -> bool:
        raise CudaTouched(os.environ.get(CONNECTIONS))

    with (
        patch.dict(os.environ, {CONNECTIONS: given} if given else {}),
        patch.object(torch.cuda, "is_available", touched),
        pytest.raises(CudaTouched) as raised,
    ):
        train.main([*arguments], Signals(speaks=False))
    return raised.value.args[0]


def test_it_is_set_before_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONNECTIONS, raising=False)
    assert value_at_first_use(CONFIG) == "1"
    assert value_at_first_use(CONFIG, "parallel.tp=1") == "32"
    assert value_at_first_use(CONFIG, "parallel.zero_stage=2") == "32"  # reduces in each layer
    assert value_at_first_use(CONFIG, given="8") == "8", "the user's value"
    for wrong in ([], ["/nowhere"], [CONFIG, "parallel.tp=x"]):  # one rank reports it later
        assert value_at_first_use(*wrong) is None
    with patch.object(train, "set_connections"):  # control
        assert value_at_first_use(CONFIG) is None


def test_a_check_of_the_configuration_prepares_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS reads its variable at its first product, and flash attention's backward is
    deterministic only under torch's flag. A value with which neither holds is refused."""
    flag = torch.are_deterministic_algorithms_enabled()
    alone = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1", "train.deterministic=true"]
    config = try_config([str(ROOT / "configs/laptop.yaml"), *alone])
    found: list[tuple[str, bool]] = []

    def tried(*_: object) -> None:
        found.append((os.environ[CUBLAS], torch.are_deterministic_algorithms_enabled()))

    for name in ("check_gpu", "check_kernels", "check_fits"):
        monkeypatch.setattr(checks, name, lambda *_: None)
    monkeypatch.setattr(checks, "describe_attention", tried)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    try:
        with patch.dict(os.environ):
            os.environ.pop(CUBLAS, None)
            checks.check_config(config, "cuda")
        with patch.dict(os.environ, {CUBLAS: ":4096:2:16:8"}), pytest.raises(UserError) as refused:
            checks.check_config(config, "cuda")
    finally:
        torch.use_deterministic_algorithms(flag)
    assert found == [(":4096:8", True)]
    assert (refused.value.key, refused.value.value) == (CUBLAS, ":4096:2:16:8")


def import_again() -> None:
    """Print what importing our modules uses of torch.cuda, and then what a use of it adds."""
    for name, module in [*sys.modules.items()]:
        file = Path(getattr(module, "__file__", None) or "/")
        if ROOT in file.parents and "site-packages" not in file.parts:
            del sys.modules[name]
    used: list[str] = []
    for name in ("is_available", "device_count", "_lazy_init", "get_device_properties"):
        setattr(torch.cuda, name, lambda *_, name=name: used.append(name))
    importlib.import_module("train")
    print(used)
    torch.cuda.is_available()
    print(used, flush=True)


def test_no_import_uses_cuda(tmp_path: Path) -> None:
    """`import train` does not initialize CUDA, which would read the variable too early."""
    log, errors = tmp_path / "log", tmp_path / "errors"
    assert status(forked(log, import_again, errors=errors)) == 0, errors.read_text()
    assert log.read_text().splitlines() == ["[]", "['is_available']"]
