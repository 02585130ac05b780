"""Looks for races: every operator is issued on the current stream, and what it reads and writes is
checked.

Tensors of the device are those of costs/as_on_gpu.py, without data. What an operator does
internally (a kernel's table of pointers, a workspace) is not seen.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from costs.as_on_gpu import DEVICE
from costs.events import event_of
from costs.operators import (
    HostCopy,
    accesses,
    host_copy,
    needs_value,
    on_device,
    on_host,
    takes_from_host,
    tensors_of,
    value_without_data,
)
from costs.storages import key_of
from tools.rehearse.accesses import Accesses
from tools.rehearse.collectives import GroupAxes, Nccl
from tools.rehearse.device import Device
from tools.rehearse.findings import line
from tools.rehearse.overlap import Computing, Overlap


class Races:
    """The streams of a fake GPU, what is accessed on them, and what overlaps.

    Args:
        axes: names the collectives.
        saw: to be called with every tensor, before it is accessed.
    """

    def __init__(self, device: Device, axes: GroupAxes, saw: Callable[[Tensor], None]) -> None:
        self.device, self.saw = device, saw
        self.accesses, self.overlap = Accesses(device.findings), Overlap(device)
        device.joined = self.overlap.joined
        self.nccl = Nccl(device, self.accesses, self.overlap, axes)
        self.operators = 0
        self._pinned: dict[int, range] = {}  # addresses of storages of the host, by their keys

    def report(self) -> dict[str, Any]:
        return {
            "findings": [
                f"{kind}: {text}" + (f" ({count} times)" if count > 1 else "")
                for (kind, text), count in self.device.findings.items()
            ],
            "operators": self.operators,
            "compared": self.accesses.compared,  # pairs of accesses
        }

    # --- storages ---

    def born(self, key: int) -> None:
        self.accesses.allocate(key, self.device.current_stream(), line())

    def freed(self, key: int) -> None:
        self.accesses.free(key, line())

    def pin(self, tensor: Tensor) -> Tensor:
        """Treat a tensor of the host as pinned."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        self._pinned[storage._cdata] = range(begin, begin + storage.nbytes())
        self.accesses.allocate(storage._cdata, self.device.host(), line(), pinned=True)
        weakref.finalize(storage, self._unpin, storage._cdata).atexit = False
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is pinned; a storage inside that of another one is, too, and is
        watched from now on."""
        inside = any(tensor.data_ptr() in addresses for addresses in self._pinned.values())
        if inside and key_of(tensor) not in self._pinned:
            self.pin(tensor)
        return inside

    def _unpin(self, key: int) -> None:
        del self._pinned[key]
        self.accesses.free(key, line())

    # --- operators ---

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = list(tensors_of([*args, *kwargs.values()]))
        for tensor in given:
            self.saw(tensor)
        if (copy := host_copy(func, args, kwargs)) is not None:
            return self._copy(func, args, kwargs, copy)
        if on_device(given) and (what := needs_value(func, args, kwargs)):
            return self._read(func, args, kwargs, what)
        result = func(*args, **kwargs)
        made = list(tensors_of([result]))
        for tensor in made:
            self.saw(tensor)
        if on_device([*given, *made]):
            if takes_from_host(given):
                self._wait(f"{func} copies a tensor of the host to the device")
            self._issue(func, args, kwargs, result)
        elif self._pinned:
            self._on_host(func, args, kwargs, result)
        return result

    def _issue(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        touched = list(accesses(func, args, kwargs, result))
        if not touched:
            return
        self.operators += 1
        stream = self.device.issue()
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t, _ in touched)
        if recorded and stream is not self.device.compute:
            raise NotImplementedError(
                f"{func} at {line()} is recorded by autograd on {stream.name}"
            )
        number = stream.advance()
        self.accesses.access(stream, number, f"{func} at {line()}", touched)
        if stream is self.device.compute:
            event = event_of(func, args, kwargs, result)
            if isinstance(event, Computing):
                self.overlap.computed[number] = event

    def _on_host(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        touched = list(accesses(func, args, kwargs, result))
        if any(self._is_pinned(tensor) for tensor, _ in touched if tensor.device.type == "cpu"):
            host = self.device.host()
            self.accesses.access(host, host.advance(), f"{func} at {line()}", touched)

    def _wait(self, why: str) -> None:
        self.device.waits(why, self.device.issue().point())

    def _read(self, func: Any, args: Any, kwargs: Any, what: str) -> Any:
        """The host reads from the device: it waits. Zero or false stands for the value."""
        self._issue(func, args, kwargs, None)
        self._wait(f"{func} needs {what}")
        if what == "a value":
            return value_without_data(func, args)
        raise NotImplementedError(
            f"{func} at {line()} needs {what}: the host waits, and a tensor without data has none"
        )

    # --- copies between host and device ---

    def _copy(self, func: Any, args: Any, kwargs: Any, copy: HostCopy) -> Any:
        """A copy makes the host wait, unless it is asked not to and the host's memory is pinned."""
        source, target, blocks = copy
        fills = func is torch.ops.aten.copy_.default
        read = args[1] if fills else args[0]
        if fills:
            result = args[0] if target == "cpu" else func(*args, **kwargs)
        elif target == "cpu":
            result = on_host(read, kwargs.get("dtype"))
            # torch then pins the result (aten/src/ATen/native/TensorConversions.cpp)
            if not blocks:
                self.pin(result)
        else:
            result = func(*args, **kwargs)
        self.saw(result)
        host = read if source == "cpu" else result
        pinned = not host.numel() or self._is_pinned(host)
        self.operators += 1
        stream, (here, there) = self.device.issue(), (read, result)
        name = f"the copy from {_name(source)} to {_name(target)} at {line()}"
        self.accesses.access(stream, stream.advance(), name, [(here, False), (there, True)])
        if blocks or not pinned:
            why = " without non_blocking" if blocks else " with memory that is not pinned"
            self._wait(f"a copy from {_name(source)} to {_name(target)}{why}")
        return result


def _name(device: str) -> str:
    return "the device" if device == DEVICE else "the host"
