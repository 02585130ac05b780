"""What an operator reads and writes, and when it makes the host wait for the device."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from costs.events import NO_WORK, tensors_of
from costs.storages import key_of

# Their schema declares no write, but they copy the inputs into the second argument
# (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, all_gather_copy_in_cuda).
_WRITES_ARGUMENT = {"fsdp::all_gather_copy_in": 1}
# They return another view of their argument, without being declared as views.
_NO_KERNEL = NO_WORK | {"_unsafe_view", "_reshape_alias", "lift_fresh", "is_pinned", "set_"}


def accesses(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operator reads (False) and writes (True), by its schema."""
    schema = func._schema
    name = schema.name.split("::")[-1]
    if func.is_view or name in _NO_KERNEL:
        return
    only_shape = name.endswith("_like") or name.startswith("new_")
    given = set()
    for number, argument in enumerate(schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        writes = writes or _WRITES_ARGUMENT.get(schema.name) == number
        for tensor in tensors_of([value]):
            given.add(key_of(tensor))
            if not only_shape:
                yield tensor, writes
    for tensor in tensors_of([result]):
        if key_of(tensor) not in given:
            yield tensor, True


def needs_value(func: Any, args: Any) -> str:
    """What the host must read from the device before the operator can return: a value, or the shape
    of the result. Empty: nothing."""
    if torch.Tag.data_dependent_output in func.tags:
        return "a value"
    if torch.Tag.dynamic_output_shape in func.tags:
        # the operator of x[indices] is the same for masks, which have to be counted
        masks = any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(args[1:]))
        if func is not torch.ops.aten.index.Tensor or masks:
            return "a shape"
    return ""
