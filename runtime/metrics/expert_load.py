"""How evenly the rows of tokens spread over the experts of each layer, over the steps since the
last logged one.

| figure        | of a layer's X experts                              | even | worst         |
|---------------|-----------------------------------------------------|------|---------------|
| entropy       | −Σ p log p / log X, p an expert's share of the rows | 1    | log k / log X |
| largest_share | the largest p, times X                              | 1    | X / k         |
| dead          | the number of experts without a row                 | 0    | X − k         |

Each step's counts (training/balance.py) are added on the device, which also computes the figures;
only they travel to the host, with the other measurements of the logged step.

Routing has collapsed in a layer if either is true of the last `LASTING_STEPS` steps or more, taken
together:

    experts are dead: they had no row in all that time
    one expert had more than halfway from an even load, k/X of the tokens, to all of them; and it,
    or another, still has in the last logged interval

"Halfway" depends on k/X because half of the tokens is an even load if each goes to 1 of 2 experts.
A bias needs about a hundred steps to act (`bias_rate` is about 0.001, scores are at most 1),
and a loss no fewer; until then, an uneven load is how a run begins, or recovers. It must last over
`LASTING_INTERVALS` logged intervals, because one odd interval of many steps is not lasting, and
until there are `ENOUGH_ROWS` rows per expert: fewer are a few sequences, whose tokens resemble each
other. (In random choices, a standard deviation of an expert's rows is then 3% of an even load.)
A layer that has collapsed is named once, and again only after it has recovered.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.experts import Experts
from training.balance import Loads

LASTING_STEPS, LASTING_INTERVALS = 100, 3
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

    def of_busiest(self, model: ModelConfig) -> list[float]:
        """The share of the tokens that have a row of the busiest expert, by layer."""
        each = model.of(Experts)
        return [share * each.per_token / each.count for share in self.largest_share]


class LoadStatistics:
    """Adds the loads of a run's steps; every rank has one.

    Args:
        model: one that has experts.
        device: that of the loads.
    """

    def __init__(self, model: ModelConfig, device: str) -> None:
        self.model, self.layers = model, model.layers_with_experts
        shape = model.num_layers, model.of(Experts).count
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)  # since the last log
        self.lasting = torch.zeros_like(self.counts)  # since layers were last judged
        self.steps, self.intervals = 0, 0  # those of `lasting`
        self.collapsed: dict[int, str] = {}  # as last judged

    def add(self, loads: Loads) -> None:
        """Add a step's loads. The host does not wait."""
        self.counts += loads.counts
        self.lasting += loads.counts
        self.steps += 1

    def reset(self) -> None:
        """Forget the loads: those steps come again."""
        self.counts.zero_()
        self._judged()

    def figures(self) -> Tensor:
        """[8 · L]: `figures_of` the interval, and of the steps to judge, on the device. A new
        interval begins."""
        found = torch.stack([figures_of(self.counts), figures_of(self.lasting)]).flatten()
        self.counts.zero_()
        self.intervals += 1
        return found

    def read(self, figures: list[float]) -> tuple[ExpertLoads, str]:
        """The result of `figures`, on the host: the loads of the interval, and a warning about the
        layers whose routing has collapsed, newly; empty if there are none."""
        half = len(figures) // 2
        interval, lasting = self._loads(figures[:half]), self._loads(figures[half:])
        enough = min(lasting.rows) >= ENOUGH_ROWS * self.counts.shape[1]
        if self.steps < LASTING_STEPS or self.intervals < LASTING_INTERVALS or not enough:
            return interval, ""
        before, self.collapsed = self.collapsed, self._collapsed(interval, lasting)
        over = f"over the last {self.steps} steps"
        self._judged()
        new = [f"layer {n}: {why}" for n, why in self.collapsed.items() if n not in before]
        what = f"warning: routing has collapsed {over}; {'; '.join(new)}"
        remedy = "raise model.experts.router_aux_weight, or with router sigmoid_bias its bias_rate"
        return interval, f"{what}. To mend it, {remedy}" if new else ""

    def _judged(self) -> None:
        self.lasting.zero_()
        self.steps, self.intervals = 0, 0

    def _loads(self, figures: list[float]) -> ExpertLoads:
        size = self.model.num_layers
        entropy, largest, dead, rows = (
            [figures[at + layer] for layer in self.layers] for at in range(0, 4 * size, size)
        )
        return ExpertLoads(
            self.layers, entropy, largest, list(map(int, dead)), list(map(int, rows))
        )

    def _collapsed(self, interval: ExpertLoads, lasting: ExpertLoads) -> dict[int, str]:
        """What is wrong with each layer whose routing has collapsed, in words."""
        found, experts = {}, self.counts.shape[1]
        even = self.model.of(Experts).per_token / experts
        most = (1 + even) / 2
        for layer, dead, busiest, last in zip(
            self.layers,
            lasting.dead,
            lasting.of_busiest(self.model),
            interval.of_busiest(self.model),
            strict=True,
        ):
            if dead:
                found[layer] = f"{dead} of {experts} experts had no token"
            elif min(busiest, last) > most:
                found[layer] = f"one expert had {busiest:.0%} of the tokens (even: {even:.0%})"
        return found
