"""Replaces what a GPU would do, so that the fake GPU can note it: launches of this repository's
Triton kernels, and calls for which the host waits."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import model.kernels
from costs.as_on_gpu import DEVICE
from costs.operators import copies_values, on_host
from hardware import H100
from model.kernels import backend
from tools.rehearse.device import Event


class _Launcher:
    """Takes the place of a Triton kernel."""

    def __init__(self, name: str, launched: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **_: self.launched(self.name, args)


def kernels_of(module: ModuleType) -> list[str]:
    """The names of the functions that `module` decorates with `jit`."""
    return [
        node.name
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "jit" for d in node.decorator_list)
    ]


@contextmanager
def recorded_launches(launched: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """A context in which a launch of one of this repository's Triton kernels calls `launched` with
    the kernel's name and arguments, and does nothing else. Triton need not be installed."""
    with ExitStack() as stack:
        for found in pkgutil.iter_modules(model.kernels.__path__):
            module = importlib.import_module(f"model.kernels.{found.name}")
            for name in kernels_of(module):
                launcher = _Launcher(f"{found.name}.{name.strip('_')}", launched)
                stack.enter_context(patch.object(module, name, launcher))
        if isinstance(backend.tl, SimpleNamespace):  # no Triton: names of dtypes, which go unused
            for name in ("float32", "float64", "bfloat16"):
                stack.enter_context(patch.object(backend.tl, name, name, create=True))
        # some kernels launch so many programs, and add up their parts
        count = H100.multiprocessors
        stack.enter_context(patch.object(backend, "_multiprocessors", lambda device: count))
        yield


class _ReadsOnHost(TorchFunctionMode):
    """Notes calls that wait for the device and are no operators."""

    def __init__(self, waited: Callable[[str], None]) -> None:
        super().__init__()
        self.waited = waited

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.tolist, Tensor.numpy) and args[0].device.type == DEVICE:
            self.waited(func.__name__)
            return func(on_host(args[0], None))
        if copies_values(func, kwargs):
            self.waited(f"{func.__name__} on the device")
        return func(*args, **kwargs)


@contextmanager
def recorded_waits(waited: Callable[[str], None]) -> Iterator[None]:
    """A context in which calls for which the host waits, and which are no operators, call
    `waited`."""

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **__: waited(name)

    synchronize = [
        (torch.cuda, "torch.cuda.synchronize"),
        (torch.cuda.Event, "Event.synchronize"),
        (torch.cuda.Stream, "Stream.synchronize"),
        (Event, "Event.synchronize"),
    ]
    with ExitStack() as stack:
        for owner, name in synchronize:
            stack.enter_context(patch.object(owner, "synchronize", note(name)))
        stack.enter_context(_ReadsOnHost(waited))
        yield
