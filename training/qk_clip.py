"""QK-clip (Kimi K2, https://arxiv.org/abs/2507.20534, section 2.1): attention logits that grow too
large are scaled down in the weights. Under Muon they grow more often than under AdamW, because its
steps change all directions of q and k equally.

S is a head's largest logit over all tokens of the global batch, and τ the limit
(optimizer.muon.qk_clip). If S > τ, then after the step's update rows of the head's projections are
scaled, such that all of its logits are multiplied by γ = τ / S. The kind of attention says which
rows, and by which power of γ (`BaseAttention.rows_of_heads`):

| rows                                        | power of γ                                         |
|---------------------------------------------|----------------------------------------------------|
| q and k of a head that has keys of its own  | ½ each                                             |
| q of a head that shares its keys            | 1: other heads may be below the limit              |

So no tp rank needs to know of another one's heads, and what a rank has of a weight is multiplied
where it is.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.attention import attentions_of
from parallel.collectives import all_reduce
from parallel.mesh import Mesh
from parallel.parameter import NamedWeight
from parallel.placement import local_region
from settings.config import Config


class Rows(NamedTuple):
    """What this rank has of a projection, which decides logits."""

    part: Tensor  # [R, …], shares the memory of the weight
    heads: Tensor  # [R] int64: the head, of this rank's, to which a row belongs
    powers: Tensor  # [R]: by which power of γ a row is multiplied

    @classmethod
    def of(
        cls, part: Tensor, where: range, first: int, of_head: Sequence[tuple[int, float]]
    ) -> "Rows":
        """
        Args:
            where: the rows of the weight that `part` has.
            first: the number of this rank's first head in the model.
            of_head: of one head's rows, one after another, how many have which power.
        """
        powers = torch.cat([part.new_full((count,), power) for count, power in of_head])
        row = torch.arange(where.start, where.stop, device=part.device)
        return cls(part, row // len(powers) - first, powers[row % len(powers)])

    def scale(self, gammas: Tensor) -> None:
        """Multiply the rows, by γ of each of this rank's heads."""
        factors = gammas[self.heads].to(self.part) ** self.powers
        self.part.mul_(factors.view(-1, *[1] * (self.part.ndim - 1)))


class QKClip:
    """The attention layers of this rank's stages, in a run with optimizer.muon.qk_clip."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        stages: Mapping[int, nn.Module],
        weights: Sequence[NamedWeight],
    ) -> None:
        own, exact = getattr(config.optimizer, config.optimizer.name), config.precision.exact
        self.mesh = mesh
        self.limit, self.interval, self.due = own.qk_clip, own.qk_clip_interval, False
        found = [each for stage in stages.values() for each in attentions_of(stage)]
        self.largest = [layer.watch_logits(mesh.device, exact) for _, layer in found]
        parts = {each.name: each.sharded for each in weights}
        self.rows: list[list[Rows]] = []  # of each layer
        for name, layer in found:
            first, of_layer = mesh.tp.rank * layer.local_heads, list[Rows]()
            for projection, of_head in layer.rows_of_heads().items():
                part = parts[f"{name}.{projection}.weight"]
                of_layer.append(Rows.of(part.to_local(), local_region(part)[0], first, of_head))
            self.rows.append(of_layer)
        self.home = weights[0].sharded.to_local().device  # offloaded weights: not the GPU
        self.lowest = torch.full((1,), -torch.inf, dtype=exact, device=mesh.device)

    def begin(self, step: int) -> None:
        """Before the first forward of a step (0-based)."""
        self.due = step % self.interval == 0
        for each in self.largest:
            each.begin(self.due)

    @torch.no_grad()
    def __call__(self, norm: Tensor) -> Tensor | None:
        """After the update of a step, which changes nothing if `norm` is not finite. Returns the
        model's largest logit, if this step measures it. Every rank calls it; the host does not wait
        (unless weights are offloaded from a GPU)."""
        if not self.due:
            return None
        assert all(each.noted for each in self.largest), "`inputs` must return watched(mask)"
        heads = [len(each.found) for each in self.largest]
        found = torch.cat([self.lowest[:0], *(each.found for each in self.largest)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.mesh.loss.group)
        over = (found > self.limit) & found.isfinite() & norm.isfinite()
        gammas = torch.where(over, self.limit / found, 1.0).to(self.home)
        for of_layer, rows_of_layer in zip(gammas.split(heads), self.rows, strict=True):
            for rows in rows_of_layer:
                rows.scale(of_layer)
        largest = torch.cat([found, self.lowest]).max()
        for axis in (self.mesh.tp, self.mesh.pp):
            largest = all_reduce(largest, axis.group, dist.ReduceOp.MAX)
        return largest
