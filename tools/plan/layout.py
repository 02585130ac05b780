"""What one rank of the world holds: units, their weights as FSDP shards them, widths of dtypes."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from costs.recorder import Phase
from costs.summary import blocks
from costs.units import EMBEDDING, HEAD, LocalWeight, Sums, Unit, kinds_of_layers, unit
from errors import UserError
from parallel.axes import AXES, FSDP_AXES
from parallel.config import MAX_RANKS
from parallel.fsdp_units import sharded_dimension
from parallel.pipeline.actions import Action, Kind, stage_ranks
from parallel.pipeline.check import splits_backward
from parallel.pipeline.lower import Program, lower
from parallel.pipeline.schedules import build_schedule
from parallel.placement import chunk_range, dim_of
from parallel.weight_gradient import sum_dtype
from parallel.whole_matrices import Hop, Round, matrices_over, rounds_of
from settings.config import Config
from training.optimizers import bytes_of_states, optimizer_class

# The kinds of actions of a schedule that splits backward, and of another.
KINDS = {
    True: (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    False: (Kind.FORWARD, Kind.BACKWARD),
}
PHASES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.BACKWARD_INPUT: "input",
          Kind.BACKWARD_WEIGHT: "weight"}  # fmt: skip


def world_of(path: str, config: Config, gpus: int | None) -> int:
    """The number of ranks: `gpus`, or the product of the axes, or the number in the file's first
    line (`# world: 256`). Raises UserError."""
    parallel = config.parallel
    if gpus is not None:
        check_gpus("--gpus", gpus)
        return gpus
    if parallel.dp_shard != -1:
        return math.prod(getattr(parallel, axis) for axis in AXES)
    first_line = re.match(r"# world: (\d+)\n", Path(path).read_text(encoding="utf-8-sig"))
    if first_line is None:
        why = "parallel.dp_shard=-1 needs the number of GPUs, which is not known"
        raise UserError("--gpus", None, why, "give --gpus N")
    return int(first_line[1])


def check_gpus(key: str, number: int) -> None:
    """Raises UserError."""
    if not 1 <= number <= MAX_RANKS:
        why = f"must be at least 1 and at most {MAX_RANKS:,}"
        raise UserError(key, number, why, "give a number of GPUs")


PLAIN: dict[str, Any] = {  # settings of `parallel` that are valid on one rank
    **dict.fromkeys(("tp", "cp", "pp", "ep", "dp_shard", "dp_replicate"), 1),
    **{"schedule": "1f1b", "stages_per_rank": 1, "layers_per_stage": None},
}
schedule_of = lru_cache(maxsize=4)(build_schedule)  # long ones are large


@lru_cache(maxsize=16)
def programs_of(schedule: str, pp: int, v: int, m: int) -> list[Program]:
    return lower(schedule_of(schedule, pp, v, m))


@lru_cache(maxsize=1024)
def ranks_of_stages(name: str, pp: int, stages_per_rank: int) -> list[int]:
    """The pipeline rank of each stage, whatever the number of micro-batches."""
    return stage_ranks(build_schedule(name, pp, stages_per_rank, 2 * pp))


class Sharding(NamedTuple):
    """The ranks over which weights are sharded, and those that have the same shard."""

    shards: int
    replicas: int
    rank: int  # of `shards`


class Gathered:
    """Weights that FSDP gathers and reduces together: those of a unit, or of all units of a stage,
    all of experts or none (parallel/fsdp_units.py). Shapes are those of the tp rank's or ep rank's
    weights, before FSDP shards them."""

    def __init__(self, is_expert: bool, weights: Sequence[LocalWeight], sharding: Sharding) -> None:
        self.is_expert, self.weights = is_expert, weights
        self.shards, self.replicas, self.rank = sharding
        self.numel = sum(weight.numel for weight in weights)
        # each weight, with the dimension over which FSDP shards it
        self.cuts = [(weight, sharded_dimension(weight.shape, self.shards)) for weight in weights]
        # the number of elements of each in a gather or reduction, with rows padded to a multiple
        # of `shards`
        rows = [(weight.shape[cut], weight.numel) for weight, cut in self.cuts]
        self.padded_each = [-(-n // self.shards) * self.shards * (numel // n) for n, numel in rows]
        self.padded = sum(self.padded_each)
        # the number of elements of the experts that FSDP cuts
        self.cut_within = sum(weight.numel for weight, cut in self.cuts if cut)

    def parts(self) -> Iterator[tuple[LocalWeight, list[int]]]:
        """Each weight, with the shape of the part that this rank keeps of it."""
        for weight, cut in self.cuts:
            shape = list(weight.shape)
            shape[cut] = len(chunk_range(shape[cut], self.shards, self.rank))
            yield weight, shape


@lru_cache(maxsize=4096)
def gathered(rest: Sharding, experts: Sharding, units: tuple[Unit, ...]) -> list[Gathered]:
    """The FSDP units of `units`, in the order in which a forward has used them: experts are inside
    of the others."""
    weights = [weight for unit in units for weight in unit.weights]
    parts = [
        (kind, [w for w in weights if w.spec.is_expert is kind], sharding)
        for kind, sharding in ((True, experts), (False, rest))
    ]
    return [Gathered(*part) for part in parts if part[1]]


class Numbers(NamedTuple):
    """Numbers of parameters, or of the ranks that share them."""

    rest: int  # all but experts
    experts: int

    @property
    def total(self) -> int:
        return self.rest + self.experts

    def over(self, shards: "Numbers") -> float:
        """Parameters on each rank."""
        return self.rest / shards.rest + self.experts / shards.experts


def numbers_of(unit: Unit) -> Numbers:
    """The parameters of a unit on the tp and ep rank."""
    experts = sum(weight.numel for weight in unit.weights if weight.spec.is_expert)
    return Numbers(unit.numel - experts, experts)


@dataclass(eq=False)
class Layout:
    """One rank's part of the job. Ranks that differ only in their data-parallel coordinates are
    alike, but for what Muon gives them; those that differ in their cp coordinate almost (`Setting`
    in costs/setting.py)."""

    config: Config
    world: int
    pp_rank: int
    rank: int = 0  # among those of the same pipeline rank
    imbalance: float = 1.0  # of the rows that experts receive (costs/routing.py)

    def __post_init__(self) -> None:
        config, p = self.config, self.config.parallel
        self.sizes = p.mesh_sizes(self.world)
        here = self.sizes.coordinates(self.rank)
        self.num_microbatches = config.num_microbatches(self.sizes.dp)
        self.pipeline = p.schedule, p.pp, p.stages_per_rank, self.num_microbatches
        self.num_stages = p.num_stages
        # the pipeline rank of each stage
        self.where = ranks_of_stages(p.schedule, p.pp, p.stages_per_rank)
        self._units: list[list[Unit]] = []  # of each stage

        # by whether a weight is of experts
        weights, experts = self.sizes.of_weights, self.sizes.of_experts
        shards, of_experts = weights["dp_shard"], experts["efsdp"]
        at, inside = self.rank // self.sizes.tp, self.rank // self.sizes.ep
        self.sharding = {
            False: Sharding(shards, weights["dp_replicate"], at % shards),
            True: Sharding(of_experts, experts["ep_replicate"], inside % of_experts),
        }
        # whether no rank shares this rank's weights, so that FSDP is not used
        views = [*self.sharding.values()][: 1 + config.model.has_experts]
        alone = all(each.shards * each.replicas == 1 for each in views)
        self.offloads = p.offload != "none"
        self.whole = alone and not self.offloads

        # widths, in bytes
        dtypes = config.precision
        self.compute, self.reduce = dtypes.compute.itemsize, dtypes.reduce.itemsize
        self.master = dtypes.master.itemsize  # weights, moments, reduced gradients between steps
        self.exact = dtypes.exact.itemsize  # statistics and losses
        # in which gradients are summed over micro-batches; None: they are not
        self.sum_dtype = sum_dtype(self.whole, p.zero_stage, *dtypes[:3])
        # of these sums, or of the gradients of one micro-batch
        self.sum = self.compute if self.sum_dtype is None else self.sum_dtype.itemsize
        self.optimizer = optimizer_class(config.optimizer.name)
        self.states_of = self.optimizer.states_of
        # bytes of a number of the optimizer's products with whole matrices
        self.products = self.optimizer.products_in(dtypes.master).itemsize

        # all that the units' records depend on, apart from the unit
        setting = config.setting(here["tp"], here["cp"])
        self.setting = replace(setting, imbalance=self.imbalance)
        self.embedding, self.head = unit(self.setting, EMBEDDING), unit(self.setting, HEAD)
        self.hidden_bytes = self.embedding.hidden_bytes  # that pass from unit to unit
        # the tokens of a micro-batch on this rank
        self.tokens = self.setting.tokens * config.train.micro_batch_size

    @classmethod
    def of_rank(cls, config: Config, world: int, rank: int) -> "Layout":
        return cls(config, world, *divmod(rank, world // config.parallel.pp))

    def at(self, pp_rank: int) -> "Layout":
        """The same job on another pipeline rank; what is equal on all ranks is not recomputed."""
        other = copy(self)
        other.pp_rank, other.splits_backward = pp_rank, self.splits_backward
        return other

    @property
    def stages(self) -> list[int]:
        """The stages of this pipeline rank."""
        return [s for s, rank in enumerate(self.where) if rank == self.pp_rank]

    @property
    def schedule(self) -> Sequence[Sequence[Action]]:
        return schedule_of(*self.pipeline)

    @property
    def program(self) -> Program:
        """What this pipeline rank does in a step."""
        return programs_of(*self.pipeline)[self.pp_rank]

    @cached_property
    def splits_backward(self) -> bool:
        return splits_backward(self.schedule)

    # --- between steps ---

    def bytes_of_states(self, weight: LocalWeight, shape: Sequence[int] | None = None) -> int:
        """Bytes of the optimizer's states of a weight on the tp or ep rank, or of a part of it."""
        states = self.states_of(weight.spec)
        return bytes_of_states(states, shape or weight.shape, self.master)

    def axes_of(self, weight: LocalWeight) -> list[Hop]:
        """The axes over which a weight is cut, or equal, by name; seen from this rank."""
        is_expert, placement = weight.spec.is_expert, weight.spec.placement
        shards, replicas, rank = self.sharding[is_expert]
        over_replicas, over_shards = FSDP_AXES[is_expert]
        inner = "ep" if is_expert else "tp"
        size = getattr(self.sizes, inner)
        at, inside = divmod(self.rank, size)
        cut = None if placement.is_replicate() else dim_of(placement)
        return [
            Hop(over_replicas, replicas, at // shards, None),
            Hop(over_shards, shards, rank, sharded_dimension(weight.shape, shards)),
            Hop(inner, size, inside, cut),
        ]

    def gathered(self, *units: Unit) -> list[Gathered]:
        """The FSDP units of `units`, if they are gathered together."""
        return gathered(self.sharding[False], self.sharding[True], units)

    def parts(self, units: Iterable[Unit]) -> Iterator[tuple[LocalWeight, list[int]]]:
        """Each weight of units, in the order of the model, with the shape of this rank's part."""
        for one in units:
            shapes = dict(pair for each in self.gathered(one) for pair in each.parts())
            yield from ((weight, shapes[weight]) for weight in one.weights)

    def rounds(self) -> list[list[Round]]:
        """In which the optimizer puts whole matrices together."""
        units = (one for stage in self.stages for one in self.units(stage))
        return rounds_of(
            [
                matrix
                for each, part in self.parts(units)
                if self.optimizer.takes_whole(each.spec)
                for matrix in matrices_over(each.spec.shape, part, self.axes_of(each))
            ]
        )

    # --- units ---

    @cached_property
    def kinds(self) -> Counter[Unit]:
        """One block of each kind, and how many blocks the model has of it."""
        return blocks(replace(self.setting, tp_rank=0))

    def units(self, stage: int) -> list[Unit]:
        """The units of a stage, in the order of forward."""
        if not self._units:
            by_kind = {unit.name: unit for unit in self.kinds}
            layers = [by_kind[kind] for kind in kinds_of_layers(self.config.model)]
            self._units += [[layers[i] for i in part] for part in self.config.split_layers()]
            self._units[0].insert(0, self.embedding)
            self._units[-1].append(self.head)
        return self._units[stage]

    def fsdp_units(self, stage: int) -> list[tuple[list[int], Gathered]]:
        """The weights that are gathered and reduced together, each with the indices of the `units`
        that they belong to. Experts come before the rest of their unit."""
        units = self.units(stage)
        parts = [range(len(units))]
        if self.whole or self.config.parallel.fsdp_unit == "block":
            parts = [range(i, i + 1) for i in range(len(units))]
        return [
            ([i for i in part if not one.is_expert or numbers_of(units[i]).experts], one)
            for part in parts
            for one in self.gathered(*(units[i] for i in part))
        ]

    def phase(
        self, kind: Kind, unit: Unit, first: bool = False, last: bool = False, begun: bool = True
    ) -> Phase:
        """What a unit does in an action of this kind. `first`: the unit is the first of a stage
        whose input comes from another stage; `last`: it is the last of a stage whose output goes to
        another stage; `begun`: an earlier micro-batch has begun the sums of its gradients."""
        whole = kind is Kind.BACKWARD or (kind is Kind.FORWARD and not self.splits_backward)
        sums = None if self.sum_dtype is None else Sums(self.sum_dtype, begun)
        return unit.phases(not whole, sums, first, last)[PHASES[kind]]
