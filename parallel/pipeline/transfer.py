"""Point-to-point between pipeline ranks: between two actions, one batch of sends and receives.

A rank that has just computed sends its result and receives what its next action needs, both in one `batch_isend_irecv`.
That is the form NCCL needs: it matches messages by order alone and may not buffer, so a send and a receive that two
neighbours post in opposite order, one at a time, would wait for each other forever. In 1F1B's steady state rank r posts
{send F(i) down, receive B(j) from below} exactly where rank r + 1 posts {send B(j) up, receive F(i) from above}.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.pipeline.schedule import Action, Kind, rank_of_stage


class Transfers:
    """Sends and receives of one step, for hidden states and their gradients of one shape and dtype.

    Args:
        group: the pp group.
        num_stages: of the whole pipeline.
        shape, dtype, device: of a hidden state between stages, [S/tp, B, D].
    """

    def __init__(
        self, group: ProcessGroup, num_stages: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.group, self.num_stages = group, num_stages
        self.shape, self.dtype, self.device = shape, dtype, device
        self.ranks = dist.get_process_group_ranks(group)
        self.sending: list[tuple[Any, list[Tensor]]] = []

    def exchange(self, done: Action | None, result: Tensor | None, upcoming: Action | None) -> Tensor | None:
        """Send `result` of the action just `done` to its neighbour stage, and return what `upcoming` needs from its own."""
        operations, sent, received = [], [], None
        if done is not None and result is not None:
            receiver = done.stage + 1 if done.kind is Kind.FORWARD else done.stage - 1
            sent = [result.detach().contiguous()]
            operations.append(dist.P2POp(dist.isend, sent[0], self._peer(receiver), group=self.group))
        if upcoming is not None:
            sender = upcoming.stage - 1 if upcoming.kind is Kind.FORWARD else upcoming.stage + 1
            if 0 <= sender < self.num_stages:
                received = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                operations.append(dist.P2POp(dist.irecv, received, self._peer(sender), group=self.group))
        if operations:
            works = dist.batch_isend_irecv(operations)
            # NCCL gives one work for the batch, gloo one per operation, in order: the last one covers the receive.
            if received is not None:
                works.pop().wait()
            if works:  # gloo reads `sent` until it has gone: keep it alive, but do not wait. NCCL's stream knows of it.
                self.sending.append((works, sent))
        return received

    def finish(self) -> None:
        """Wait until everything sent in this step has left."""
        for works, _ in self.sending:
            for work in works:
                work.wait()
        self.sending.clear()

    def _peer(self, stage: int) -> int:
        return self.ranks[rank_of_stage(stage, len(self.ranks))]
