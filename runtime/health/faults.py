"""`guard.inject_fault`: flip a bit in products of one layer on one rank, for tests and drills.

    {rank: 3, step: 20, layer: 1, product: forward, bit: 30, times: 1}       a transient fault: of
                                                                             step 20
    {rank: 3, step: 20, layer: 1, product: forward, bit: 30, times: always}  a persistent one: from
                                                                             step 20 on

`product` is forward, input_gradient or weight_gradient, of the last linear layer of the block. The
first number of its result has the fault. Bit 30 is the highest of a float32's exponent; of a
bfloat16's it is bit 14, of a float64's bit 62.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError
from runtime.agreement import on_all_ranks
from runtime.health.products import Compute, Inputs, linear_layers, wrap
from runtime.listener import Listener, Run
from runtime.output import log
from training.step import TrainStep

KEY = "guard.inject_fault"
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Faults(Listener):
    """Injects the fault that the configuration asks for; every rank has one."""

    def __init__(self, train: TrainStep) -> None:
        assert train.config.guard.inject_fault is not None
        self.fault = train.config.guard.inject_fault
        self.left = 0.0  # faults that are still to come
        layers = linear_layers(train)
        names = [name for name in layers if f"blocks.{self.fault['layer']}." in name]
        on_all_ranks(lambda: self._check(train, names), train.mesh.device)
        if dist.get_rank() == self.fault["rank"]:
            wrap({names[-1]: layers[names[-1]]}, self._disturbed)
            log(f"warning: a fault will be injected: {KEY}={self.fault}")

    def before_step(self, run: Run) -> None:
        if run.step + 1 == self.fault["step"]:
            times = self.fault["times"]
            self.left = math.inf if times == "always" else times

    def _disturbed(self, name: str, kind: str, compute: Compute, inputs: Inputs) -> Tensor:
        result = compute()
        if kind == self.fault["product"] and self.left > 0:
            self.left -= 1
            flip(result, self.fault["bit"])
        return result

    def _check(self, train: TrainStep, names: list[str]) -> None:
        """Raise UserError if there is no such rank, layer (`names`: of its linear layers here) or
        bit."""
        rank, world = self.fault["rank"], dist.get_world_size()
        dtype, bits = train.config.train.dtype, torch.finfo(train.config.precision.compute).bits
        if rank >= world:
            raise UserError(KEY, self.fault, f"there are {world} ranks", f"at most {world - 1}")
        if self.fault["bit"] >= bits:
            raise UserError(KEY, self.fault, f"a {dtype} has {bits} bits", f"at most {bits - 1}")
        if rank == dist.get_rank() and not names:
            why = f"it has no linear layer in layer {self.fault['layer']} that can be wrapped"
            remedy = "choose a layer of that rank's stages, and train.compile=false"
            raise UserError(KEY, self.fault, why, remedy)


@torch.no_grad()
def flip(tensor: Tensor, bit: int) -> None:
    """Flip a bit of the tensor's first number."""
    size = tensor.element_size()
    bits = tensor.detach().view(BITS[size]).view(-1)
    bits[0] ^= -(1 << bit) if bit == 8 * size - 1 else 1 << bit
