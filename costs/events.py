"""The events of a record: operations with their FLOPs and bytes, and collectives; and how they are
read from the operators that a computation calls."""

import math
from typing import Any, NamedTuple

import torch

from costs.collectives import Call
from costs.operators import NO_WORK, by_name, name_of, tensors_of, traffic

BACKWARD_OF_FORWARD = 2.5  # flash attention's FLOPs: five products in backward, two in forward
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
# of experts (model/kernels/grouped_matmul.py)
GROUPED = {"grouped_mm", "add_grouped_weight_gradient"}
LOOKUPS = {"embedding", "index", "index_select", "gather"}  # read some rows of the first argument


class Product(NamedTuple):
    """A matrix product, or `number` products in one operator. Those of experts may have different
    sizes: then `rows` and `inner` are the largest."""

    rows: int  # of the result
    columns: int
    inner: int  # length of the sums
    bytes: int  # read and written
    width: int  # bytes of a number of the factors
    number: int = 1
    launches: int = 1  # kernels: `number` if the products run one after another
    unequal: float | None = None  # the FLOPs of all products, if they have different sizes

    @property
    def flops(self) -> float:
        if self.unequal is not None:
            return self.unequal
        return 2.0 * self.number * self.rows * self.columns * self.inner

    def tiles(self, side: int) -> int:
        """The number of tiles of side × side that cover the results."""
        return self.number * -(-self.rows // side) * -(-self.columns // side)


class Attention(NamedTuple):
    """Attention's scores, softmax and weighted sum in one operator, or their backward."""

    flops: float  # of the scores that are not masked
    whole_flops: float  # of the scores of all queries and keys


class Moved(NamedTuple):
    """An operation that is bound by memory bandwidth."""

    bytes: int  # read and written


class Sent(NamedTuple):
    """The start of a collective."""

    call: Call
    number: int  # identifies the collective within the record


class Waited(NamedTuple):
    """The wait for a collective's result."""

    number: int


Event = Product | Attention | Moved | Sent | Waited


def event_of(func: Any, args: Any, kwargs: Any, result: Any) -> Event | None:
    """The event of an operator, or None if it neither reads nor writes memory (views, empty)."""
    name = name_of(func)
    if func.is_view or name in NO_WORK:
        return None
    named = by_name(func, args, kwargs)
    if "query" in named and "key" in named:
        return _attention(named)
    read, written = traffic(func, args, kwargs, list(tensors_of([result])))
    size = sum(t.nbytes for t in [*(written if name in LOOKUPS else read[:1]), *read[1:], *written])
    if name in GROUPED:
        return _grouped(name, named, size)
    if name.rstrip("_") in PRODUCTS:  # their right factor is the last matrix among the arguments
        right = [t for t in tensors_of(args) if t.dim() >= 2][-1]
        *batch, rows, columns = result.shape
        return Product(rows, columns, right.shape[-2], size, right.itemsize, math.prod(batch))
    return Moved(size) if size else None


def _grouped(name: str, named: dict[str, Any], size: int) -> Product:
    """The event of the products of all experts of a layer: x [R, N] with matrices b [X, N, M] or
    with dy [R, M], whose rows are spread over the experts as evenly as they can."""
    x, forward = named["x"], name == "grouped_mm"
    (total, inner), columns = x.shape, named["b" if forward else "dy"].shape[-1]
    experts = len(named["ends"])
    most = -(-total // experts)
    shape = (most, columns, inner) if forward else (columns, inner, most)
    # One kernel for bfloat16, of weight gradients for 16-bit factors; else, or with
    # model.kernels=torch, a loop.
    has_kernel = x.dtype == torch.bfloat16 if forward else x.itemsize == 2
    launches = 1 if has_kernel and named.get("kernels") != "torch" else experts
    flops = 2.0 * total * columns * inner
    return Product(*shape, size, x.itemsize, experts, launches, flops)


def _attention(named: dict[str, Any]) -> Attention:
    """The event of scaled dot-product attention or of its backward: q is [B, H, S', E], k
    [B, H, S, E]; or [T', H, E] and [T, H, E] with sequences of at most max_q queries and max_k
    keys. A bias counts as a causal mask, whatever it masks."""
    q, k, v = named["query"], named["key"], named["value"]
    if q.dim() == 4:
        (batch, heads, queries), keys = q.shape[:3], k.shape[2]
        window = (-1, 0 if named.get("is_causal") or named.get("attn_bias") is not None else -1)
    else:
        heads, queries, keys = q.shape[1], named["max_q"], named["max_k"]
        batch, window = q.shape[0] // queries, named["window_size"]
    behind, ahead = (keys if side < 0 else side for side in window)
    each = 2.0 * batch * heads * (q.shape[-1] + v.shape[-1])
    is_backward = "grad_out" in named or "grad_out_" in named
    each *= BACKWARD_OF_FORWARD if is_backward else 1.0
    return Attention(each * pairs(queries, keys, behind, ahead), each * queries * keys)


def pairs(queries: int, keys: int, behind: int, ahead: int) -> float:
    """The number of scores of the last `queries` tokens of a sequence of `keys` tokens that attend
    to at most `behind` tokens before and `ahead` tokens after them. A causal mask counts as half of
    S × S, as is usual (PaLM, appendix B)."""

    def seen(first: int, distance: int) -> float:
        """By the first tokens of the sequence, of tokens before them."""
        if distance >= first:
            return first**2 / 2
        return first * distance - distance**2 / 2  # the first tokens have fewer before them

    return seen(keys, behind) - seen(keys - queries, behind) + seen(queries, ahead)
