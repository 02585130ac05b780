"""Execute the exchanges of a program: pass tensors from one stage to another, in the same process
or over the network."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.pipeline.actions import Message
from parallel.pipeline.lower import Exchange


class Transfers:
    """Passes hidden states and their gradients, all of one shape and dtype, between stages.

    `give` stores the result of an action, and `take` returns what an action needs. If the two
    stages are on different ranks, both ranks post, in between, the exchange that holds the message
    (parallel/pipeline/lower.py).

    Args:
        group: the pp group.
        shape, dtype, device: those of a hidden state between stages, [S/tp, B, D].
    """

    def __init__(
        self,
        group: ProcessGroup,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.group, self.shape, self.dtype, self.device = group, shape, dtype, device
        self.ranks = dist.get_process_group_ranks(group)
        self._here: dict[Message, Tensor] = {}  # given, not yet taken or sent
        self._receiving: dict[Message, tuple[Any, Tensor]] = {}
        self._sending: list[tuple[Any, Tensor]] = []
        # The first use of an NCCL communicator must involve all its ranks, whereas an exchange
        # involves only a few.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def give(self, message: Message, tensor: Tensor) -> None:
        self._here[message] = tensor.detach()

    def exchange(self, exchange: Exchange) -> None:
        """Post sends of messages that were given and receives of messages that will be taken, in
        one batch, without waiting."""
        operations = []
        for transfer in exchange.transfers:
            if transfer.sends:
                tensor = self._here.pop(transfer.message).contiguous()
            else:
                tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            call = dist.isend if transfer.sends else dist.irecv
            operations.append(dist.P2POp(call, tensor, self.ranks[transfer.peer], group=self.group))
        works = dist.batch_isend_irecv(operations)
        if len(works) == 1:  # NCCL returns one work per batch, gloo one per operation, in order
            works = works * len(operations)
        self._sending = [(w, t) for w, t in self._sending if not w.is_completed()]
        for transfer, operation, work in zip(exchange.transfers, operations, works, strict=True):
            if transfer.sends:
                # gloo reads the tensor until it is sent: keep it alive until then
                self._sending.append((work, operation.tensor))
            else:
                self._receiving[transfer.message] = (work, operation.tensor)

    def take(self, message: Message) -> Tensor:
        """Return a message that was given on this rank, or wait for it from another rank."""
        if message in self._here:
            return self._here.pop(message)
        work, tensor = self._receiving.pop(message)
        work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
        assert not self._here, "a message was given that no action took"
        assert not self._receiving, "a message was received that no action took"
