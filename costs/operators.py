"""PyTorch's operators as a dispatch mode sees them: what each reads and writes, which launch
nothing, and when the host waits for the device."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from costs.as_on_gpu import DEVICE
from costs.storages import key_of, local

_aten = torch.ops.aten

NO_WORK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach",
           "_unsafe_view"}  # the last reshapes the result of a product  # fmt: skip
# They neither compute nor copy: some return another view without being declared as views.
NO_LAUNCH = NO_WORK | {"_reshape_alias", "lift_fresh", "is_pinned", "resize_", "set_"}
# Their schemas declare no write, but they copy the inputs into this argument
# (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, all_gather_copy_in_cuda).
_WRITES_ARGUMENT = {"fsdp::all_gather_copy_in": 1}
_HOST_COPIES = {_aten.copy_.default, _aten._to_copy.default}


def name_of(func: Any) -> str:
    """The name of an operator, without its library and its overload."""
    name: str = func._schema.name.split("::")[-1]
    return name


def tensors_of(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def on_device(tensors: list[Tensor]) -> bool:
    """Whether one of them is on the device that stands for a GPU."""
    return any(local(tensor).device.type == DEVICE for tensor in tensors)


# --- what is read and written ---


def launches_nothing(func: Any) -> bool:
    return func.is_view or name_of(func) in NO_LAUNCH


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call that were given."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def arguments_of(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, list[Tensor], bool]]:
    """Each argument of a call, by the operator's schema: the schema's entry, the tensors, and
    whether they are written."""
    schema = func._schema
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        writes = writes or _WRITES_ARGUMENT.get(schema.name) == number
        yield argument, list(tensors_of([value])), writes


# They have the same numbers as their source, perhaps in another dtype.
COPIES = {
    "_to_copy", "copy", "copy_", "index_copy_", "clone", "cat", "stack", "repeat", "_foreach_copy_",
    "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "_chunk_cat", "constant_pad_nd",
}  # fmt: skip
FILLS = {
    "zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones", "fill_", "full",
    "full_like", "new_full", "scalar_tensor", "_foreach_zero_",
}  # fmt: skip


def traffic(
    func: Any, args: Any, kwargs: Any, made: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes. `made`: its results."""
    name = name_of(func)
    if name == "all_gather_copy_in":  # FSDP: copies the inputs into a part of the output
        return list(args[0]), made[:1]
    read: list[Tensor] = []
    written: list[Tensor] = []
    overwrites = name in COPIES or by_name(func, args, kwargs).get("beta") == 0
    for argument, tensors, mutated in arguments_of(func, args, kwargs):
        written += tensors if mutated else []
        if name not in FILLS and not (mutated and (argument.is_out or overwrites)):
            read += tensors
    written += [t for t in made if not any(t is other for other in written)]
    return read, written


def accesses(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operator reads (False) and writes (True), by its schema."""
    if launches_nothing(func):
        return
    name, given = name_of(func), set()
    only_shape = name.endswith("_like") or name.startswith("new_")
    for _, tensors, writes in arguments_of(func, args, kwargs):
        for tensor in tensors:
            given.add(key_of(tensor))
            if not only_shape:
                yield tensor, writes
    for tensor in tensors_of([result]):
        if key_of(tensor) not in given:
            yield tensor, True


# --- when the host waits ---


def needs_value(func: Any, args: Any, kwargs: Any) -> str:
    """What the host must read from the device before the operator can return: a value, or the shape
    of the result. Empty: nothing."""
    # torch does not tag equal, which returns a bool
    if torch.Tag.data_dependent_output in func.tags or func is _aten.equal.default:
        return "a value"
    # repeat_interleave can be told the length of its result
    if torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
        # the operator of x[indices] is the same for masks, which have to be counted
        masks = any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(args[1:]))
        if func is not _aten.index.Tensor or masks:
            return "a shape"
    return ""


class HostCopy(NamedTuple):
    """A copy between the host and the device."""

    source: str  # types of devices
    target: str
    blocks: bool  # whether the host waits for it, whatever its memory is


def host_copy(func: Any, args: Any, kwargs: Any) -> HostCopy | None:
    """What the operator copies between host and device; None: nothing."""
    if func not in _HOST_COPIES:
        return None
    if func is _aten.copy_.default:
        source, target = args[1].device.type, args[0].device.type
    else:
        device, source = kwargs.get("device"), args[0].device.type
        target = source if device is None else torch.device(device).type
    if source == target or DEVICE not in (source, target):
        return None
    free = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return HostCopy(source, target, not free)


def takes_from_host(tensors: Iterable[Tensor]) -> bool:
    """Whether another operator of the device, with these arguments, first copies one from the host,
    which waits. (A number without dimensions is passed with the launch.)"""
    return any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors)


def copies_values(func: Any, kwargs: Any) -> bool:
    """Whether a function of torch copies values of Python to the device: the host waits, because
    their memory is not pinned."""
    device = str(kwargs.get("device") or "cpu")
    return func in (torch.tensor, torch.as_tensor) and torch.device(device).type == DEVICE
