"""Kinds of dispatch, one file each: how tokens reach the experts that they have chosen, and how the
results return. `ExpertParallel.dispatch` names the file, whose class `Dispatch` is used. It derives
from `TokenDispatch`.

    all_to_all.py  ranks have different tokens, which travel to the ranks of their experts
    expert_sum.py  all ranks have the same tokens, and their results are summed; without backward
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from kinds import load_kind
from parallel.expert import Choice, ExpertParallel, Received
from parallel.kept import KeptOutputs


class RowKernels(NamedTuple):
    """From tokens [T, D] to their rows [T·k, D] and back (model/kernels/token_rows.py)."""

    spread: Callable[[Tensor, Tensor, Tensor, int], Tensor]  # of tokens, order, places [T·k], k
    sum: Callable[[Tensor, Tensor, int], Tensor]  # of rows, places [T·k], k


class TokenDispatch(nn.Module):
    """Sends tokens to their experts and the results back, for one layer. It has no weights."""

    def __init__(self, ep: ExpertParallel, kept: KeptOutputs, kernels: RowKernels) -> None:
        super().__init__()
        self.ep, self.kept, self.kernels = ep, kept, kernels

    def send(self, x: Tensor, choice: Choice) -> Any:
        """Start to send x [T, D] and the weights of the choice. What is computed before `receive`
        overlaps the sending. Returns what `receive` and `combine` need."""
        raise NotImplementedError

    def receive(self, sent: Any) -> Received:
        raise NotImplementedError

    def combine(self, y: Tensor, sent: Any) -> Tensor:
        """Map the experts' results [R, D] to the sum of each token's [T, D]."""
        raise NotImplementedError


def make_dispatch(ep: ExpertParallel, kept: KeptOutputs, kernels: RowKernels) -> TokenDispatch:
    return load_kind(__name__, ep.dispatch, "Dispatch")(ep, kept, kernels)


def counts_on_host(counts: Tensor) -> list[int]:
    """The host waits for the device here, and nowhere else in a layer of experts unless its grouped
    products are loops (model/kernels/grouped_matmul.py)."""
    return counts.tolist()
