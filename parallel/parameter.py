"""The description of a weight, given once, where a layer creates it. No later code infers it from a
name.

    WeightSpec((4096, 1024), Shard(0), Normal(0.02), MATRIX, gradient_is_partial=False)

| used by                               | fields                                        |
|---------------------------------------|-----------------------------------------------|
| tensor parallelism (layer.py)         | shape, placement                              |
| FSDP (fsdp_units.py)                  | is_expert                                     |
| initial weights (model/initialise.py) | initial, copy_of                              |
| sum over tp (partial.py)              | gradient_is_partial                           |
| the optimizer                         | group, copy_of                                |
| gradient norm, checkpoints, counts    | copy_of: each global tensor counts once       |

FSDP2 replaces the parameters of a module when it shards it, and attributes set on them are lost. So
the layer keeps the description, and `weights_of` lists each parameter with its description.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class Normal:
    """Independent, normally distributed numbers with mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same number everywhere."""

    value: float


class Group(NamedTuple):
    """A group of weights that an optimizer treats alike."""

    name: str
    decays: bool  # whether weight decay applies


MATRIX = Group("matrix", decays=True)  # of a hidden layer
EMBEDDING = Group("embedding", decays=True)  # and the head
ROUTER = Group("router", decays=True)
NORM = Group("norm", decays=False)


@dataclass(frozen=True)
class WeightSpec:
    """The description of one weight of the model."""

    shape: tuple[int, ...]  # global
    # over tp (of experts: over ep); shards are uneven if it does not divide the dimension
    # (`chunk_range`)
    placement: Shard | Replicate
    initial: Normal | Constant
    group: Group  # how the optimizer treats it
    _: KW_ONLY
    gradient_is_partial: bool  # each tp rank has one term of a sum over tp (partial.py)
    copy_of: str | None = None  # global name of the weight of which this is a copy (tied.py)
    is_expert: bool = False  # placed over ep; FSDP shards it over the mesh's axes of experts


@dataclass(frozen=True)
class NamedWeight:
    """A parameter of a stage, with its name and its description."""

    name: str  # of the parameter
    spec: WeightSpec
    # as it was when listed; while FSDP has the module's weights gathered, the module holds another
    # object
    parameter: nn.Parameter

    @property
    def global_name(self) -> str:
        """The name of the global tensor, on which initial weights, checkpoints and random bits
        depend."""
        return self.spec.copy_of or self.name

    @property
    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return math.prod(self.spec.shape)

    @property
    def is_copy(self) -> bool:
        return self.spec.copy_of is not None

    @property
    def sharded(self) -> DTensor:
        """The parameter, detached from autograd."""
        tensor = self.parameter.detach()
        assert isinstance(tensor, DTensor)
        return tensor

    @property
    def gradient(self) -> DTensor:
        gradient = self.parameter.grad
        assert isinstance(gradient, DTensor)
        return gradient


def weights_of(stage: nn.Module) -> list[NamedWeight]:
    """All weights of a stage, in the order of its parameters.

    Raises:
        AssertionError: a layer has registered a parameter without a description, or a buffer.
    """
    found = []
    for prefix, layer in stage.named_modules():
        if isinstance(spec := layer.__dict__.get("spec"), WeightSpec):
            assert isinstance(layer.weight, nn.Parameter)
            found.append(NamedWeight(f"{prefix}.weight".removeprefix("."), spec, layer.weight))
    registered = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
    # no checkpoint would contain them, and `to_empty` loses their values
    registered |= {name for name, _ in stage.named_buffers(remove_duplicate=False)}
    unknown = sorted(registered - {each.name for each in found})
    assert not unknown, f"parameters or buffers registered without Layer.add_weight: {unknown}"
    return found
