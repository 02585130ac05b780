"""Expert parallelism: each rank holds some of the experts of a layer. A router makes a `Choice`, a
dispatch (dispatch/) brings the rows of each expert together, and their results back.

All ranks of dp_shard × cp × tp have different tokens, and ep is a part of them (axes.py). So the
gradient of an expert covers all tokens of its ep group, and FSDP's plain sum over efsdp and
ep_replicate adds the rest: no factor is needed.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class ExpertParallel(Axis):
    """The ep axis, as a layer of experts sees it."""

    # The groups over which a sequence is split, and the number of its parts.
    sequence: tuple[ProcessGroup, ...] = ()
    parts: int = 1
    dispatch: str = "all_to_all"  # how tokens reach their experts: a file of dispatch/

    @classmethod
    def of(cls, mesh: Mesh) -> "ExpertParallel":
        cp, tp = mesh.cp, mesh.tp
        return cls(**vars(mesh.ep), sequence=(cp.group, tp.group), parts=cp.size * tp.size)


class Choice(NamedTuple):
    """The experts that a router has chosen for this rank's T tokens, in one layer."""

    experts: Tensor  # [T, k] int64
    weights: Tensor  # [T, k], in at least float32; with a gradient
    counts: Tensor  # [B, X] int64: how often the tokens of each sequence chose each expert
