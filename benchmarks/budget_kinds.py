"""What an operator is to the budget's ledger, and the tensors and bytes that it moves."""

from typing import Any

from torch import Tensor

from costs.events import Attention, Event, Product
from costs.operators import arguments_of, name_of
from costs.storages import local

# The kinds of operators, in the order in which they are printed.
PRODUCT, ATTENTION, TRITON, POINTWISE = "product", "attention", "Triton", "pointwise"
COPY, FILL, COLLECTIVE, OF_ONE_RANK = "copy", "fill", "collective", "collective of one rank"
KINDS = {
    PRODUCT: "matrix products",
    ATTENTION: "scaled dot-product attention (one library call, which may launch helpers)",
    TRITON: "launches of this repository's Triton kernels",
    POINTWISE: "elementwise operations, reductions and look-ups of PyTorch",
    COPY: "copies, casts, clones, cat: the same numbers in another place or dtype",
    FILL: "fills with one value, such as zeros",
    COLLECTIVE: "collectives, and messages of the pipeline",
    OF_ONE_RANK: "collectives of one rank in place, which launch nothing",
}
COPIES = {
    "_to_copy", "copy", "copy_", "index_copy_", "clone", "cat", "stack", "repeat", "_foreach_copy_",
    "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "_chunk_cat", "constant_pad_nd",
}  # fmt: skip
FILLS = {
    "zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones", "fill_", "full",
    "full_like", "new_full", "scalar_tensor", "_foreach_zero_",
}  # fmt: skip
# PyTorch carries it out as two: a copy, and the same in place.
LAUNCHES = {"masked_fill": 2}


def kind_of(name: str, event: Event | None) -> str:
    if isinstance(event, Product | Attention):
        return PRODUCT if isinstance(event, Product) else ATTENTION
    return COPY if name in COPIES else FILL if name in FILLS else POINTWISE


def size_of(tensors: list[Tensor]) -> int:
    """Bytes that the tensors occupy in memory; an expanded dimension counts once."""
    return sum(min(t.nbytes, local(t).untyped_storage().nbytes()) for t in tensors)


def traffic(
    func: Any, args: Any, kwargs: Any, made: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes. `made`: its results."""
    name = name_of(func)
    if name == "all_gather_copy_in":  # FSDP: copies the inputs into a part of the output
        return list(args[0]), made[:1]
    read: list[Tensor] = []
    written: list[Tensor] = []
    for argument, tensors, mutated in arguments_of(func, args, kwargs):
        written += tensors if mutated else []
        if name not in FILLS and not (mutated and (argument.is_out or name in COPIES)):
            read += tensors
    written += [t for t in made if not any(t is other for other in written)]
    return read, written
