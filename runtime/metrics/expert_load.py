"""How evenly the rows of tokens spread over the experts of each layer, over the steps since the
last logged one.

| figure        | of a layer's X experts                              | even | worst         |
|---------------|-----------------------------------------------------|------|---------------|
| entropy       | −Σ p log p / log X, p an expert's share of the rows | 1    | log k / log X |
| largest_share | the largest p, times X                              | 1    | X / k         |
| dead          | the number of experts without a row                 | 0    | X − k         |

Each step's counts (training/balance.py) are added on the device, which also computes the figures;
only they travel to the host, with the other measurements of the logged step.
"""

import math
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.experts import Experts
from training.balance import Loads


def figures_of(counts: Tensor) -> Tensor:
    """The entropy, largest share and dead experts of each layer, [3, L] float64, on the device of
    `counts` [L, X]. A layer without rows has zeros, and X dead experts."""
    experts, rows = counts.shape[1], counts.sum(1)
    share = counts.double() / rows.clamp(min=1).unsqueeze(1)
    entropy = -torch.xlogy(share, share).sum(1) / math.log(max(experts, 2))
    return torch.stack([entropy, share.amax(1) * experts, (counts == 0).sum(1).double()])


class LoadStatistics:
    """Adds the loads of a run's steps; every rank has one.

    Args:
        model: one that has experts.
        device: that of the loads.
    """

    def __init__(self, model: ModelConfig, device: str) -> None:
        self.layers = model.layers_with_experts
        shape = model.num_layers, model.of(Experts).count
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)  # since the last log

    def add(self, loads: Loads) -> None:
        """Add a step's loads. The host does not wait."""
        self.counts += loads.counts

    def take(self) -> Tensor:
        """[3 · L]: `figures_of` the interval, on the device. A new interval begins."""
        found = figures_of(self.counts).flatten()
        self.counts.zero_()
        return found

    def record(self, figures: list[float]) -> dict[str, Any]:
        """The entries of a metrics record, of the result of `take` on the host: a summary, and the
        figures by layer."""
        of_layers = torch.tensor(figures, dtype=torch.float64).view(3, -1)[:, self.layers]
        entropy, largest_share, dead = of_layers.tolist()
        return {
            "lowest_expert_entropy": min(entropy),
            "largest_expert_share": max(largest_share),
            "dead_experts": int(sum(dead)),
            "experts_by_layer": {
                "layer": self.layers,
                "entropy": [round(value, 4) for value in entropy],
                "largest_share": [round(value, 3) for value in largest_share],
                "dead": list(map(int, dead)),
            },
        }
