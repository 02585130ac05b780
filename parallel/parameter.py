"""What a weight is, said once, where a layer makes it; nothing later guesses it from a name or from
a number of dimensions.

    Weight(shape=(4096, 1024), placement=Shard(0), initial=Normal(0.02), decays=True,
    gradient_is_partial=False)

| who                                       | asks                                                                   |
|-------------------------------------------|------------------------------------------------------------------------|
| tensor parallelism (`add_weight`)         | shape, placement                                                       |
| initial weights (model/initialise.py)     | initial, copy_of                                                       |
| sum over tp (partial.py)                  | gradient_is_partial                                                    |
| the optimizer                             | decays, copy_of                                                        |
| gradient norm, checkpoints                | copy_of: each global tensor counts once                                |

FSDP2 replaces parameters when it shards a module, and what was attached to them is lost. So a
module keeps what its weights are, and `weights_of` lists both together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.placement import chunk_range


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers of mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same number everywhere."""

    value: float


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One global tensor of the model."""

    shape: tuple[int, ...]  # global
    # over tp; where tp does not divide the dimension, unevenly (`chunk_range`)
    placement: Shard | Replicate
    initial: Normal | Constant
    decays: bool  # whether weight decay applies
    # whether each tp rank's gradient is one term of a sum over tp (partial.py)
    gradient_is_partial: bool
    # the global name of the weight that this one is a second copy of (pipeline/tied.py)
    copy_of: str | None = None


@dataclass(frozen=True)
class NamedWeight:
    """A weight of a stage."""

    name: str  # of the parameter
    weight: Weight
    # as it was when listed: while FSDP has its module gathered, the module has another object
    parameter: nn.Parameter

    @property
    def global_name(self) -> str:
        """Of the global tensor behind it: what initial weights, checkpoints and random bits depend
        on."""
        return self.weight.copy_of or self.name

    @property
    def is_copy(self) -> bool:
        return self.weight.copy_of is not None

    @property
    def sharded(self) -> DTensor:
        """The parameter without autograd."""
        tensor = self.parameter.detach()
        assert isinstance(tensor, DTensor)
        return tensor

    @property
    def gradient(self) -> DTensor:
        gradient = self.parameter.grad
        assert isinstance(gradient, DTensor)
        return gradient


def add_weight(module: nn.Module, weight: Weight, tp: DeviceMesh, name: str = "weight") -> None:
    """Give `module` a parameter on the meta device: this tp rank's part of `weight`."""
    shape, local_shape = torch.Size(weight.shape), list(weight.shape)
    if isinstance(weight.placement, Shard):
        dim = weight.placement.dim
        local_shape[dim] = len(chunk_range(shape[dim], tp.size(), tp.get_local_rank()))
    local = torch.empty(local_shape, device="meta")
    stride = torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(
        local, tp, [weight.placement], run_check=False, shape=shape, stride=stride
    )
    module.register_parameter(name, nn.Parameter(placed))
    module.__dict__.setdefault("weights", {})[name] = weight


def weights_of(stage: nn.Module) -> list[NamedWeight]:
    """All weights of a stage, in the order of its parameters.

    Raises:
        AssertionError: some layer has made a parameter without saying what it is.
    """
    found = list(_walk(stage))
    unknown = {name for name, _ in stage.named_parameters(remove_duplicate=False)} - {
        each.name for each in found
    }
    assert not unknown, f"made without parallel.parameter.add_weight: {sorted(unknown)}"
    return found


def _walk(stage: nn.Module) -> Iterator[NamedWeight]:
    for prefix, module in stage.named_modules():
        for name, weight in module.__dict__.get("weights", {}).items():
            parameter = getattr(module, name)
            assert isinstance(parameter, nn.Parameter)
            yield NamedWeight(f"{prefix}.{name}" if prefix else name, weight, parameter)
