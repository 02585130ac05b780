"""The cases that the parity proof compares: every layout, and every pair of option values.

`covering_cases` makes a covering array: a small number of cases such that every two values of
different options occur together in at least one case. (Faults that need three at once are rare:
Kuhn et al. 2004, https://doi.org/10.1109/TSE.2004.24.)
"""

import functools
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from typing import Any, NamedTuple, get_args, get_type_hints

from data.config import DataConfig
from errors import UserError
from kinds import kinds_in
from model.config import ModelConfig
from model.experts import Experts
from parallel.axes import AXES, MeshSizes
from parallel.config import ParallelConfig
from parallel.pipeline.schedules import SCHEDULES
from proofs.parity.reference import has_reference, keys_to_try
from settings.checks import validate
from settings.config import Config
from settings.sections import CheckpointConfig, GuardConfig, OptimizerConfig, RunConfig, TrainConfig

STEPS = 20
SEED = 0
SEQ_LEN = 16
BATCH = 32  # sequences of a global batch
BOS = 1  # begins a document
# Warmup, decay, and clipping that takes effect in some steps only: parity of the whole step.
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=5, grad_clip=1.45)


def meshes_of(world: int) -> list[MeshSizes]:
    """Every mesh of `world` ranks."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    sizes = (MeshSizes(*each) for each in product(divisors, repeat=len(AXES)))
    return [each for each in sizes if each.world == world]


@dataclass(frozen=True)
class Case:
    """A small run. All other settings are the same in every case (`config`)."""

    layout: MeshSizes
    sequence_parallel: bool = True
    tp_pieces: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    zero_stage: int = 1
    fsdp_unit: str = "block"
    tie_embeddings: bool = False
    vocab_size: int = 251  # prime, so no tp above 1 divides it
    num_kv_heads: int = 4  # fewer than tp if tp is 8
    attention_dim: int | None = None  # or 64: all heads together twice as wide as the hidden state
    qk_norm: bool = False
    attention: str | tuple[str, ...] = "causal"
    feed_forward: str | tuple[str, ...] = "swiglu"
    rope_scaling_factor: float = 1.0
    # or "uneven", or no blocks on the first or last stage: "none_first", "none_last"
    layers: str = "even"
    activation_checkpointing: str = "none"
    offload: str = "none"
    document_mask: bool = False
    num_microbatches: int = 4
    dtype: str = "float64"
    optimizer: str = "adamw"
    # a file of model/router/: unless `feed_forward` says otherwise, each layer then has experts
    router: str | None = None
    num_experts: int = 8
    experts_per_token: int = 3
    # where the bias of each expert of router sigmoid_bias begins; None: at 0
    first_bias: tuple[float, ...] | None = None
    expert_dim: int = 16  # or 12: narrow, so gate and up form dx in one product
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    router_losses: bool = False
    # more keys of the section `model`, with values; the router's reference has its own
    keys: tuple[tuple[str, object], ...] = ()
    # or "triton": interpreted kernels are slow, so they have separate cases (chosen.py)
    kernels: str = "torch"

    @property
    def world(self) -> int:
        return self.layout.world

    def __str__(self) -> str:
        at = self.layout
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)[1:]
            if getattr(self, f.name) != f.default
        ]
        cp = f" cp={at.cp}" if at.cp > 1 else ""
        ep = f" ep={at.ep}" if at.ep > 1 else ""
        dp = f"{at.dp_replicate}x{at.dp_shard}"
        return " ".join([f"pp={at.pp} dp={dp}{cp} tp={at.tp}{ep}", *changed])

    @property
    def num_layers(self) -> int:
        stages = self.layout.pp * self.stages_per_rank
        return 2 if stages == 1 else stages + 2

    @property
    def price(self) -> float:
        """About how long a step takes: the number of ranks, times the sum of a constant (building
        and FSDP) and the layers that a rank runs forward."""
        return self.world * (4 + self.num_layers / self.layout.pp * self.num_microbatches)

    def config(self) -> Config:
        """The whole configuration. Raises UserError if the options are incompatible."""
        stages, num_layers = self.layout.pp * self.stages_per_rank, self.num_layers
        config = Config(
            ModelConfig(
                dim=32,
                num_layers=num_layers,
                num_heads=8,
                # half of SEQ_LEN: one of a head's two frequencies is scaled partly, the other fully
                rope_original_length=8,
                ffn_dim=48,
                # large, so that attention is far from uniform and every part matters
                init_std=0.15,
                **self._model(),
            ),
            ParallelConfig(
                **self.layout.by_axis(),
                ep=self.layout.ep,
                layers_per_stage=_layers_per_stage(self.layers, stages, num_layers),
                offload_dir=tempfile.gettempdir() if self.offload == "disk" else "",
                **self._keys_of(ParallelConfig),
            ),
            TrainConfig(
                steps=STEPS,
                seq_len=SEQ_LEN,
                global_batch_size=BATCH,
                micro_batch_size=max(1, BATCH // (self.layout.dp * self.num_microbatches)),
                seed=SEED,
                **self._keys_of(TrainConfig),
            ),
            self._optimizer(),
            DataConfig(path="-", document_mask=self.document_mask),
            CheckpointConfig(),
            GuardConfig(),
            RunConfig(dir="-"),
        )
        validate(config, self.world)
        return config

    def _optimizer(self) -> OptimizerConfig:
        if self.optimizer != "muon" or self.qk_norm:
            return replace(OPTIMIZER, name=self.optimizer)
        # clips some heads, and not in every step
        own = {"qk_clip": 3.0, "qk_clip_interval": 2}
        return replace(OPTIMIZER, name=self.optimizer, muon=own)

    def _keys_of(self, section: type) -> dict[str, Any]:
        """The options that have the name of a key of this section of the configuration."""
        keys = {key.name for key in fields(section)}
        return {name: value for name, value in vars(self).items() if name in keys}

    def _model(self) -> dict[str, Any]:
        """The options of the model."""
        of_router = () if self.router is None else keys_to_try("router", self.router)
        given = self._keys_of(ModelConfig) | dict(of_router) | dict(self.keys)
        if self.router is None:
            return given | {"router": ModelConfig.router}
        has_kinds = self.feed_forward != Case.feed_forward  # given, to be mixed with others
        experts = Experts(
            count=self.num_experts,
            per_token=self.experts_per_token,
            ffn_dim=self.expert_dim,
            num_shared=self.num_shared_experts,
            num_dense_layers=self.num_dense_layers,
            router_scale=2.5,
            router_aux_weight=0.01 if self.router_losses else 0.0,
            router_z_weight=0.003 if self.router_losses else 0.0,
        )
        return given | {
            "feed_forward": self.feed_forward if has_kinds else "experts",
            "experts": experts,
        }

    def is_valid(self) -> bool:
        """Whether the options are compatible, and each has an effect."""
        if self.layout.dp * self.num_microbatches > BATCH:
            return False
        try:
            self.config()
        except UserError:
            return False
        return self.layers == "even" or self.layout.pp * self.stages_per_rank > 1


def _layers_per_stage(layers: str, stages: int, num_layers: int) -> list[int] | None:
    if layers == "uneven":
        return [1] * (stages - 1) + [num_layers - stages + 1]
    if layers == "even" or stages == 1:
        return None
    few = [num_layers // (stages - 1)] * (stages - 1)
    few[0] += num_layers - sum(few)
    return [0, *few] if layers == "none_first" else [*few, 0]


@functools.cache
def option_values() -> dict[str, Sequence[object]]:
    """The values of each option that the covering array combines."""

    def every(section: type, key: str) -> tuple[object, ...]:
        """All values that a key of the configuration can have."""
        return get_args(get_type_hints(section)[key])

    piped = Case(MeshSizes(pp=2), num_microbatches=8)
    return {
        "sequence_parallel": (True, False),
        "tp_pieces": (1, 2, 4),
        # schedule, stages per rank
        "pipeline": [
            (schedule, stages)
            for schedule, stages in product(SCHEDULES, (1, 2, 4))
            if replace(piped, schedule=schedule, stages_per_rank=stages).is_valid()
        ],
        "zero_stage": (0, 1, 2, 3),
        "fsdp_unit": every(ParallelConfig, "fsdp_unit"),
        "tie_embeddings": (False, True),
        "vocab_size": (251, 256),
        "num_kv_heads": (4, 2, 8),
        "attention_dim": (None, 64),
        "qk_norm": (False, True),
        "rope_scaling_factor": (1.0, 8.0),
        "layers": ("even", "uneven", "none_first", "none_last"),
        "activation_checkpointing": every(TrainConfig, "activation_checkpointing"),
        "offload": every(ParallelConfig, "offload"),
        "document_mask": (False, True),
        "num_microbatches": (1, 2, 4, 8),
        "optimizer": [*filter(has_reference, kinds_in("training.optimizers"))],
    }


# random completions of a pair: before it counts as impossible, and if a valid one was found
TRIES, ENOUGH = 200, 60
Pair = tuple[tuple[str, object], tuple[str, object]]
AXIS_OF = {  # option → the axis that it is for
    **dict.fromkeys(("sequence_parallel", "tp_pieces"), "tp"),
    **dict.fromkeys(("pipeline", "layers"), "pp"),
    **dict.fromkeys(("zero_stage", "fsdp_unit"), "data"),
}
# For the quick proof: each axis, each pair of axes, and each kind of replica with each kind of
# shard.
QUICK_LAYOUTS = [
    MeshSizes(),
    MeshSizes(pp=2, tp=2),
    MeshSizes(pp=2, dp_shard=2),
    MeshSizes(pp=2, dp_replicate=2),
    MeshSizes(dp_shard=2, tp=2),
    MeshSizes(dp_replicate=2, tp=2),
    MeshSizes(pp=2, dp_shard=2, tp=2),
    MeshSizes(tp=8),
    MeshSizes(cp=4),
    MeshSizes(cp=2, tp=2),
    MeshSizes(dp_shard=2, cp=2),
    MeshSizes(dp_replicate=2, cp=2),
    MeshSizes(pp=2, cp=2, tp=2),
]


def layouts_of(worlds: Sequence[int], quick: bool) -> list[MeshSizes]:
    """Every layout of these numbers of ranks that makes a valid case; `quick`: of QUICK_LAYOUTS."""
    return [
        sizes
        for world in worlds
        for sizes in meshes_of(world)
        if Case(sizes).is_valid() and (not quick or sizes in QUICK_LAYOUTS)
    ]


def pairs_of(case: Case, names: Iterable[str]) -> set[Pair]:
    """Every two values of the options `names` that occur together in `case`, with an effect."""
    given = {**vars(case), "pipeline": (case.schedule, case.stages_per_rank)}
    both = combinations([(name, given[name]) for name in names], 2)
    return {(a, b) for a, b in both if has_axis_of(case.layout, a[0], b[0])}


def has_axis_of(layout: MeshSizes, *options: str) -> bool:
    """Whether the layout has the axes that the options are for: whether each has an effect. (In a
    pair with the option `layout`, one device is tried with all options.)"""
    sizes = {"tp": layout.tp, "pp": layout.pp, "data": layout.dp * layout.cp}
    alone = "layout" in options and layout.world == 1
    return alone or all(sizes.get(AXIS_OF.get(option, ""), 2) > 1 for option in options)


def wanted_pairs(values: Mapping[str, Sequence[object]]) -> list[Pair]:
    """Every two values of different options that both have an effect on the layout, or on some
    layout."""
    layouts: Any = values["layout"]
    return [
        ((a, x), (b, y))
        for (a, a_values), (b, b_values) in combinations(values.items(), 2)
        for x, y in product(a_values, b_values)
        if any(has_axis_of(at, a, b) for at in ([x] if a == "layout" else layouts))
    ]


class Covering(NamedTuple):
    """Cases in which every two values of different options occur together (`wanted_pairs`)."""

    values: Mapping[str, Sequence[object]]  # of each option
    cases: list[Case]
    impossible: list[Pair]  # that no valid case contains


def covering_cases(values: Mapping[str, Sequence[object]]) -> Covering:
    """Find the cases. The result is deterministic, and takes seconds.

    The algorithm is greedy: it fixes the first pair that is not yet covered, and of many random
    completions takes the one that covers the most new pairs for its price. (It divides by the root
    of the price: dividing by the price itself gives more, cheaper cases that cost no less in
    total.)"""
    found = Covering(values, [], [])
    if not values["layout"]:  # none has so many ranks
        return found
    uncovered: dict[Pair, None] = dict.fromkeys(wanted_pairs(values))  # an ordered set
    rng = random.Random(0)
    while uncovered:
        wanted = next(iter(uncovered))
        best: Case | None = None
        gain = 0.0
        for attempt in range(TRIES):
            chosen: dict[str, Any] = {
                **{name: rng.choice(choices) for name, choices in values.items()},
                **dict(wanted),
            }
            schedule, stages_per_rank = chosen.pop("pipeline")
            case = Case(**chosen, schedule=schedule, stages_per_rank=stages_per_rank)
            new = sum(pair in uncovered for pair in pairs_of(case, values)) / case.price**0.5
            if new > gain and case.is_valid():  # asked last, as it takes longest
                best, gain = case, new
            if attempt >= ENOUGH and best is not None:
                break
        if best is None:
            found.impossible.append(wanted)
            del uncovered[wanted]
            continue
        found.cases.append(best)
        for pair in pairs_of(best, values):
            uncovered.pop(pair, None)
    return found
