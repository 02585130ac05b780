"""How evenly the rows of tokens spread over the experts of each layer, over the steps since the
last logged one.

| figure        | of a layer's X experts                              | even | worst         |
|---------------|-----------------------------------------------------|------|---------------|
| entropy       | −Σ p log p / log X, p an expert's share of the rows | 1    | log k / log X |
| largest_share | the largest p, times X                              | 1    | X / k         |
| dead          | the number of experts without a row                 | 0    | X − k         |

Each step's counts (training/balance.py) are added on the device, which also computes the figures;
only they travel to the host, with the other measurements of the logged step.

Routing has collapsed in a layer if either is true:

    more than half of its experts are dead
    one expert's load is more than halfway from an even one, k/X of the tokens, to all of them

The second depends on k/X because half of the tokens is an even load if each goes to 1 of 2 experts.
Intervals with fewer than `ENOUGH_ROWS` rows per expert are not judged: they are a few sequences,
whose tokens resemble each other. A layer that has collapsed is named once, and again only after it
has recovered.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from training.balance import Loads

ENOUGH_ROWS = 1000  # per expert, on average


def figures_of(counts: Tensor) -> Tensor:
    """The entropy, largest share, dead experts and rows of each layer, [4, L] float64, on the
    device of `counts` [L, X]. A layer without rows has zeros, and X dead experts."""
    experts, rows = counts.shape[1], counts.sum(1)
    share = counts.double() / rows.clamp(min=1).unsqueeze(1)
    entropy = -torch.xlogy(share, share).sum(1) / math.log(max(experts, 2))
    dead = (counts == 0).sum(1)
    return torch.stack([entropy, share.amax(1) * experts, dead.double(), rows.double()])


@dataclass(frozen=True)
class ExpertLoads:
    """The figures of the layers with experts, on the host; one number per layer."""

    layers: list[int]
    entropy: list[float]
    largest_share: list[float]
    dead: list[int]
    rows: list[int]

    def record(self) -> dict[str, Any]:
        """The entries of a metrics record: a summary, and the figures by layer."""
        return {
            "lowest_expert_entropy": min(self.entropy),
            "largest_expert_share": max(self.largest_share),
            "dead_experts": sum(self.dead),
            "experts_by_layer": {
                "layer": self.layers,
                "entropy": [round(value, 4) for value in self.entropy],
                "largest_share": [round(value, 3) for value in self.largest_share],
                "dead": self.dead,
            },
        }

    def collapsed(self, model: ModelConfig) -> dict[int, str]:
        """What is wrong with each layer whose routing has collapsed, in words."""
        found = {}
        experts, chosen = model.num_experts, model.experts_per_token
        most = (1 + chosen / experts) / 2
        for layer, largest, dead, rows in zip(
            self.layers, self.largest_share, self.dead, self.rows, strict=True
        ):
            of_tokens = largest * chosen / experts  # of which the busiest expert gets a row
            if rows < ENOUGH_ROWS * experts:
                continue
            if 2 * dead > experts:
                found[layer] = f"{dead} of {experts} experts had no token"
            elif of_tokens > most:
                found[layer] = f"one expert had {of_tokens:.0%} of the tokens"
        return found


class LoadStatistics:
    """Adds the loads of a run's steps; every rank has one.

    Args:
        model: one that has experts.
        layers: which of its layers have them; at least one.
        device: that of the loads.
    """

    def __init__(self, model: ModelConfig, layers: list[int], device: str) -> None:
        self.model, self.layers = model, layers
        shape = model.num_layers, model.num_experts
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self.collapsed: dict[int, str] = {}  # as last logged

    @classmethod
    def of(cls, model: ModelConfig, device: str) -> "LoadStatistics | None":
        """None: no layer has experts."""
        layers = model.layers_with_experts
        return cls(model, layers, device) if layers else None

    def add(self, loads: Loads) -> None:
        """Add a step's loads. The host does not wait."""
        self.counts += loads.counts

    def reset(self) -> None:
        self.counts.zero_()

    def figures(self) -> Tensor:
        """[4 · L]: `figures_of` the interval, on the device."""
        return figures_of(self.counts).flatten()

    def read(self, figures: list[float]) -> ExpertLoads:
        """The result of `figures`, on the host."""
        size = self.model.num_layers
        entropy, largest, dead, rows = (
            [figures[at + layer] for layer in self.layers] for at in range(0, 4 * size, size)
        )
        return ExpertLoads(
            self.layers, entropy, largest, list(map(int, dead)), list(map(int, rows))
        )

    def newly_collapsed(self, loads: ExpertLoads) -> str:
        """A warning about the layers whose routing has collapsed since the last call; empty if
        there are none."""
        before, self.collapsed = self.collapsed, loads.collapsed(self.model)
        new = [f"layer {n}: {why}" for n, why in self.collapsed.items() if n not in before]
        if not new:
            return ""
        remedy = "raise model.router_aux_weight, or model.router_bias_rate of router sigmoid_bias"
        return f"warning: routing has collapsed; {'; '.join(new)}. If it stays so, {remedy}"
