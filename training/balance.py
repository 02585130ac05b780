"""The load of experts: counted in every step, and evened by the bias of router `sigmoid_bias`.

Routers count the rows that this rank's tokens send to each expert (model/router/_base.py). After
the last backward the counts are summed over all ranks with different tokens, as integers: a sum in
bfloat16 would lose ones above 256, and a wrong sign would move a bias the wrong way. Then the bias
of each expert with less than its layer's mean grows by the router's `bias_rate`, and of those with
more shrinks:

    bias += bias_rate · sign(mean − count)

The bias is float32 and equal on all ranks. Like a weight it is changed only by a step that the
guard lets through, is saved, loaded on any layout, and rolled back.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from model.experts import Experts
from model.router import bias_name, routers_of
from model.transformer import Transformer
from parallel.axes import WEIGHT_AXES
from parallel.mesh import Mesh
from settings.config import Config


@dataclass(frozen=True)
class Loads:
    """Of one step, the same on every rank; on the device."""

    counts: Tensor  # [L, X] int64: rows of each expert in each layer; dense layers have zeros
    losses: Tensor  # [2]: the balance loss and the z-loss, weighted, summed over layers


class Balance:
    """The routers of this rank's stages, in a training run."""

    def __init__(self, config: Config, mesh: Mesh, stages: Mapping[int, Transformer]) -> None:
        self.config, self.mesh = config, mesh
        self.routers = {
            layer: router for stage in stages.values() for layer, router in routers_of(stage)
        }
        exact, sequences = config.precision.exact, config.train.global_batch_size
        self.of_rank = {
            layer: router.start_to_count(mesh.device, exact, sequences)
            for layer, router in self.routers.items()
        }

    def __call__(self, norm: Tensor) -> Loads:
        """After the last backward of a step: sum the loads since `begin`, and change the biases,
        unless the guard skips the step (`norm` is not finite). Every rank calls it; the host does
        not wait."""
        model = self.config.model
        shape = model.num_layers, model.of(Experts).count
        counts = torch.zeros(shape, dtype=torch.int64, device=self.mesh.device)
        losses = torch.zeros(2, dtype=self.config.precision.exact, device=self.mesh.device)
        for layer, load in self.of_rank.items():
            counts[layer] = load.counts
            losses += load.losses
        for view in (self.mesh.loss, self.mesh.tp, self.mesh.pp):
            for each in (counts, losses):
                dist.all_reduce(each, group=view.group)
        loads = Loads(counts, losses)
        self.update(loads, norm)
        return loads

    def begin(self, loss_scale: Tensor) -> None:
        """Before the first forward of a step, whose losses are multiplied by the scale."""
        for load in self.of_rank.values():
            load.loss_scale = loss_scale
            load.counts.zero_()
            load.losses.zero_()

    @torch.no_grad()
    def update(self, loads: Loads, norm: Tensor) -> None:
        for layer, router in self.routers.items():
            rate = router.bias_rate(self.config.model)
            if router.bias is not None and rate:
                counts = loads.counts[layer]
                below = (counts.sum() - counts * len(counts)).sign()  # integers: exact
                router.bias.add_(torch.where(norm.isfinite(), rate * below, 0.0))

    def tensors(self) -> Iterator[tuple[str, DTensor]]:
        """The biases as global tensors that share their memory, with their names."""
        over = self.mesh.root[WEIGHT_AXES[1:]]
        everywhere = [Replicate()] * over.ndim
        for layer, router in self.routers.items():
            if router.bias is not None:
                whole = DTensor.from_local(router.bias, over, everywhere, run_check=False)
                yield bias_name(layer), whole
