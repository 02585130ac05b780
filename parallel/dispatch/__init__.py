"""Kinds of dispatch, one file each: how tokens reach the experts that they have chosen, and how the
results return. `ExpertParallel.dispatch` names the file, whose class `Dispatch` is used. It derives
from `TokenDispatch`.

    all_to_all.py  ranks have different tokens, which travel to the ranks of their experts
    expert_sum.py  all ranks have the same tokens, and their results are summed; without backward
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kinds import load_kind
from parallel.expert import Choice, ExpertParallel, Received
from parallel.kept import KeptOutputs

SumRows = Callable[[Tensor, Tensor, int], Tensor]  # rows [T·k, D], places [T·k], k → [T, D]


class TokenDispatch(nn.Module):
    """Sends tokens to their experts and the results back, for one layer. It has no weights.

    Args:
        sum_rows: the sum of each token's k rows (model/kernels/sum_rows.py).
    """

    def __init__(self, ep: ExpertParallel, kept: KeptOutputs, sum_rows: SumRows) -> None:
        super().__init__()
        self.ep, self.kept, self.sum_rows = ep, kept, sum_rows

    def send(self, x: Tensor, choice: Choice) -> Any:
        """Start to send x [T, D] and the weights of the choice. What is computed before `receive`
        overlaps the sending. Returns what `receive` and `combine` need."""
        raise NotImplementedError

    def receive(self, sent: Any) -> Received:
        raise NotImplementedError

    def combine(self, y: Tensor, sent: Any) -> Tensor:
        """Map the experts' results [R, D] to the sum of each token's [T, D]."""
        raise NotImplementedError


def make_dispatch(ep: ExpertParallel, kept: KeptOutputs, sum_rows: SumRows) -> TokenDispatch:
    return load_kind(__name__, ep.dispatch, "Dispatch")(ep, kept, sum_rows)


def counts_on_host(counts: Tensor) -> list[int]:
    """The host waits for the device here, and nowhere else in a layer of experts unless its grouped
    products are loops (model/kernels/grouped_matmul.py)."""
    return counts.tolist()
