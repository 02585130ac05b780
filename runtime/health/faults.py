"""`guard.inject_fault`: flip a bit in products of one layer on one rank, for tests and drills.

    rank=3,step=20,layer=1,product=forward,bit=30,times=1        a transient fault: of step 20
    rank=3,step=20,layer=1,product=forward,bit=30,times=always   a persistent one: from step 20 on

`product` is forward, input_gradient or weight_gradient, of the last linear layer of the block. The
first number of its result has the fault. Bit 30 is the highest of a float32's exponent; of a
bfloat16's it is bit 14, of a float64's bit 62.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError
from parallel.weight_gradient import LinearProducts
from runtime.health.products import Compute, Wrapped, Wrapping, linear_layers
from runtime.listener import Listener, Run
from runtime.messages import log, on_all_ranks
from settings.precision import Precision
from training.step import TrainStep

KEY = "guard.inject_fault"
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class FaultyProducts(Wrapped):
    """Products of which `left` more, of one kind, have a flipped bit."""

    kind, bit, left = "", 0, 0.0

    def around(self, kind: str, compute: Compute, *inputs: Tensor | None) -> Tensor:
        result = compute()
        if kind == self.kind and self.left > 0:
            self.left -= 1
            _flip(result, self.bit)
        return result


class Faults(Listener):
    """Injects the fault that the configuration asks for; every rank has one. The key has the form
    that settings/sections.py checks."""

    def __init__(self, train: TrainStep) -> None:
        asked = dict(part.split("=") for part in train.config.guard.inject_fault.split(","))
        self.rank, self.step = int(asked["rank"]), int(asked["step"])
        self.bit, self.layer = int(asked["bit"]), int(asked["layer"])
        self.kind = asked["product"]
        self.times = float("inf") if asked["times"] == "always" else int(asked["times"])
        self.is_here = dist.get_rank() == self.rank
        self.products: FaultyProducts | None = None
        on_all_ranks(lambda: self._check(train), train.mesh.device)
        if self.is_here:
            name = self._name(train)
            Wrapping({name: linear_layers(train)[name]}, self._faulty).install()
            log(f"warning: a fault will be injected: {KEY}={train.config.guard.inject_fault}")

    def before_step(self, run: Run) -> None:
        if self.products is not None and run.step + 1 == self.step:
            self.products.left = self.times

    def _faulty(self, inner: LinearProducts, name: str) -> Wrapped:
        self.products = FaultyProducts(inner, name)
        self.products.bit, self.products.kind = self.bit, self.kind
        return self.products

    def _check(self, train: TrainStep) -> None:
        """Raise UserError if there is no such rank, layer or bit."""
        config, dtype = train.config, Precision.of(train.config).compute
        value, world = config.guard.inject_fault, dist.get_world_size()
        if self.rank >= world:
            why = f"there are {world} ranks"
            raise UserError(KEY, value, why, f"choose a rank up to {world - 1}")
        bits = torch.finfo(dtype).bits
        if self.bit >= bits:
            why = f"a {config.train.dtype} has {bits} bits"
            raise UserError(KEY, value, why, f"choose a bit up to {bits - 1}")
        if self.is_here and not self._name(train):
            why = f"rank {self.rank} has no linear layer in layer {self.layer} that can be wrapped"
            remedy = "choose a layer of this rank's stages, and train.compile=false"
            raise UserError(KEY, value, why, remedy)

    def _name(self, train: TrainStep) -> str:
        """The last linear layer of the block; empty if there is none."""
        names = [name for name in linear_layers(train) if f"blocks.{self.layer}." in name]
        return names[-1] if names else ""


@torch.no_grad()
def _flip(tensor: Tensor, bit: int) -> None:
    """Flip a bit of the tensor's first number."""
    size = tensor.element_size()
    bits = tensor.detach().view(BITS[size]).view(-1)
    bits[0] ^= -(1 << bit) if bit == 8 * size - 1 else 1 << bit
