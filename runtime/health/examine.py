"""On a suspicion of silent corruption, the step is computed again, to tell who is to blame
(`guard.examine`).

    suspicion                                  known when
    a step was bad: a loss or gradient         the step is logged, at most run.log_interval later
    was not finite, or the loss spiked
    a gradient norm is LEAP times the median   likewise
    of those before
    copies differ (replicas.py)                before a save, or after guard.replica_interval steps

All ranks then call `forward_backward` three times on the rows of that step: twice as in the step,
and once with rows exchanged, each data-parallel rank computing those of the one before. A skipped
update leaves the weights as they were, so that the last step can be repeated exactly. What was
computed from the same rows must have the same bits (compare.py).

docs/recovery.md has the verdicts, and what follows from each.

An error of one rank in the middle of an examination ends the run: the others wait for it in
collectives. And if the suspicion comes again after the restart, so does the error. So there is none
if a GPU has too little memory left, or if an examination of the same step did not end before.

Each rank of a dispute computes the product once more, and in float64 on its host: a rank whose
result is further off than rounding explains is at fault. If there is none (a low bit, or a fault
that comes and goes), but results must repeat to the bit (on a CPU, or with train.deterministic), a
rank is at fault that does not repeat its own, or the only one that differs from both neighbours.
Otherwise the verdict lists those that differ, no node is excluded, and the run continues: libraries
for GPUs may choose another order of summation at any time.

What it cannot tell: with one data-parallel rank, a persistent fault that always gives the same
wrong result looks reproducible. A fault outside of linear layers is only seen as different inputs
of the products after it: the verdict then names all ranks that computed those rows. If the weights
have changed since the step, because an update followed or was made, losses and norms are compared
roughly; on GPUs without train.deterministic, nearly.
"""

import math
import statistics
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from errors import RunFailed
from parallel.placement import replicated_over
from runtime.agreement import from_rank_0
from runtime.health.compare import Computed, compute, disputes, passed_on, settle
from runtime.health.excluded import exclude, node_name
from runtime.health.replicas import MOST, ReplicasDiffer, few
from runtime.listener import Listener, Run
from runtime.log.events import NOT_EXAMINED, PERSISTENT, REPRODUCIBLE, TRANSIENT, read_events
from runtime.output import log
from runtime.trainer_state import Start, held_tensors
from training.step import StepResult, TrainStep

MORE_BYTES = 512 << 20  # that an examination takes beyond a step, for hashes and repeatable sums
KEPT = 64  # steps since the last logged one whose rows are kept
PAUSE = 100  # steps after an examination without another, unless copies differ
LEAP = 1e3  # a gradient norm this many times the median of those before is suspicious
KNOWN = 128  # norms of which the median is taken
ROUGHLY = 0.1  # relative difference of losses and norms after updates
NEARLY = 1e-3  # of losses and norms whose bits may differ on GPUs


class FaultyMachine(RunFailed):
    """A machine computes wrongly, or copies differ; the message names ranks and their nodes."""

    def __init__(self, said: str, restart_helps: bool) -> None:
        super().__init__(said)
        self.restart_helps = restart_helps


@dataclass(frozen=True)
class Suspect:
    """A step that is examined."""

    batch: tuple[Tensor, Tensor]  # this rank's rows, tokens and targets [rows, S]
    loss_scale: Tensor  # of the step, as of `StepResult`
    loss: float | None = None  # as the step had them; None: they were not wrong
    norm: float = 0.0
    is_exact: bool = True  # the weights are those of the step


@dataclass(frozen=True)
class Verdict:
    """The result of an examination, the same on every rank."""

    verdict: str  # of VERDICTS
    why: str
    ranks: list[int] = field(default_factory=list)  # among which the fault is
    is_sure: bool = False  # every one of them computes wrongly: persistent


def examine(train: TrainStep, suspect: Suspect) -> Verdict:
    """Compute the step again, at its loss scale; every rank calls it between steps, when it has no
    gradients."""
    guard = train.guard
    of_next, guard.loss_scale = guard.loss_scale, suspect.loss_scale
    verdict = _examine(train, suspect)
    guard.loss_scale = of_next
    return verdict


def _examine(train: TrainStep, suspect: Suspect) -> Verdict:
    mesh, batch = train.mesh, suspect.batch
    first, again = compute(train, *batch), compute(train, *batch)
    exchanged = compute(train, *(passed_on(part, train, +1) for part in batch))
    other = passed_on(exchanged.products, train, -1)  # of this rank's rows
    ranks = dist.get_process_group_ranks(mesh.batch.group)
    partner = ranks[(mesh.batch.rank + 1) % len(ranks)]
    mine = {
        "disputed": disputes(first.products, other),
        "wavering": disputes(first.products, again.products),
        "differs": not torch.equal(first.products, other),
        "repeats": torch.equal(first.products, again.products),
        "pair": (dist.get_rank(), partner),
    }
    everyone: list[dict[str, Any]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if any(each["disputed"] or each["wavering"] for each in everyone):
        return _find_faulty(train, batch, everyone)
    differ = {rank for each in everyone if each["differs"] for rank in each["pair"]}
    steady = all(each["repeats"] for each in everyone) and not train.config.model.has_experts
    if steady and differ:
        why = "the same rows give other results on other ranks, but in no product of linear layers"
        return Verdict(PERSISTENT, why, sorted(differ))
    return _compare_with_step(train, suspect, first)


def _find_faulty(
    train: TrainStep, batch: tuple[Tensor, Tensor], everyone: list[dict[str, Any]]
) -> Verdict:
    """The ranks whose products are wrong, from the disputes of all."""
    rank, world = dist.get_rank(), len(everyone)
    wavering = [r for r, each in enumerate(everyone) if each["wavering"]]
    involved = Counter(rank for each in everyone if each["disputed"] for rank in set(each["pair"]))
    which = {n for each in everyone if rank in each["pair"] for n in each["disputed"]}
    wrong = [settle(train, *batch, which | {*everyone[rank]["wavering"]})] * world
    dist.all_gather_object(wrong, wrong[rank])
    faulty = {r for r, is_wrong in enumerate(wrong) if is_wrong}
    if not faulty and _repeats_bits(train):
        odd = [r for r, times in involved.items() if train.mesh.batch.size > 2 and times > 1]
        faulty = {*wavering} or {*odd[: len(odd) == 1]}
    if faulty:
        why = "a product of linear layers with the same inputs has another result on this rank"
        return Verdict(PERSISTENT, why, sorted(faulty), is_sure=True)
    why = "these ranks disagree about a product with the same inputs, now by no more than rounding"
    return Verdict(PERSISTENT, why, sorted({*involved, *wavering}))


def _repeats_bits(train: TrainStep) -> bool:
    """Whether the same products have the same bits at any time, on any of these machines."""
    return train.mesh.device == "cpu" or train.config.train.deterministic


def _compare_with_step(train: TrainStep, suspect: Suspect, now: Computed) -> Verdict:
    """The verdict if no ranks disagree."""
    is_compiled = not len(now.products)  # on every rank (products.py)
    agree = "all ranks agree"
    if is_compiled:
        agree = "with train.compile no products are left to compare"
    if suspect.loss is None:
        return Verdict(NOT_EXAMINED if is_compiled else TRANSIENT, f"computed again, {agree}")
    if not suspect.is_exact:
        # as bad as then; if only the loss was a spike, the norm may be anything
        same = not math.isfinite(now.loss) or not math.isfinite(now.norm)
        same |= math.isclose(now.loss, suspect.loss, rel_tol=ROUGHLY) and (
            now.norm > ROUGHLY * suspect.norm
        )
    else:
        tolerance = 0.0 if _repeats_bits(train) else NEARLY
        found, then = (
            torch.tensor([each.loss, each.norm], dtype=torch.float64) for each in (now, suspect)
        )
        same = torch.allclose(found, then, rtol=tolerance, atol=0.0, equal_nan=True)
    weights = "" if suspect.is_exact else " with changed weights"
    result = f"loss {now.loss:.6g}, gradient norm {now.norm:.6g}"
    why = f"computed again{weights}, {agree}: {result}"
    return Verdict(REPRODUCIBLE if same else TRANSIENT, why)


def refusal(folder: Path, step: int, device: str) -> str:
    """Why the examination after `step` must not be made, the same on every rank; or the empty
    string. Every rank calls it, between steps."""
    lacking = torch.tensor(_lacking_bytes(device), device=device)
    dist.all_reduce(lacking, op=dist.ReduceOp.MAX)  # one int64, over the world
    if lacking.item() > 0:
        return f"a rank lacks {lacking.item() / 2**20:,.0f} MiB of GPU memory to compute it again"
    if from_rank_0(lambda: _did_not_end(folder, step)):
        return "an examination of this step was begun before, and did not end"
    return ""


def _lacking_bytes(device: str) -> int:
    """What a GPU lacks to compute as much as in the steps so far, and MORE_BYTES; ≤ 0: nothing."""
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    wanted = torch.cuda.max_memory_allocated() - held + MORE_BYTES
    return wanted - (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - held)


def _did_not_end(folder: Path, step: int) -> bool:
    """Whether the last examination that was begun was of this step, and found nothing."""
    last = None
    for event in read_events(folder):
        if event["event"] in ("examining", "suspicion"):
            last = last if event.get("verdict") == NOT_EXAMINED else event
    return last is not None and last["event"] == "examining" and last.get("step") == step


@torch.no_grad()
def make_copies_equal(train: TrainStep) -> None:
    """Give all copies the numbers of the first: of copies that differ, any will do to compute with,
    but not to train with."""
    for held in held_tensors(train):
        local = held.tensor.to_local()
        for axis in replicated_over(held.tensor):
            group = train.mesh.views[axis].group
            copy = local.to(train.mesh.device)
            dist.broadcast(copy, src=dist.get_process_group_ranks(group)[0], group=group)
            local.copy_(copy)


def _overflowed(loss: float, norm: float, scale: float) -> bool:
    """Whether float16 overflowed in a step because its loss scale was too large."""
    return scale > 1 and math.isfinite(loss) and not math.isfinite(norm)


class Examination(Listener):
    """Examines suspicions, and tells the verdicts. It comes after `metrics`, which knows of skipped
    updates, and before the listeners that react to them."""

    def __init__(self, train: TrainStep) -> None:
        self.folder, self.train = Path(train.config.run.dir), train
        # of the steps since the last logged one
        self.steps: deque[tuple[tuple[Tensor, Tensor], StepResult]] = deque(maxlen=KEPT)
        self.norms: deque[float] = deque(maxlen=KNOWN)
        self.next_step = 0  # at the earliest, after which something is examined again
        self.nodes = [""] * dist.get_world_size()
        dist.all_gather_object(self.nodes, node_name())

    def after_step(self, run: Run) -> None:
        self.steps.append((run.batch, run.result))
        if run.step_seconds is None:
            return
        steps, self.steps = self.steps, deque(maxlen=KEPT)
        # the device has been waited for
        values = [(r.loss, r.grad_norm, r.bad_in_a_row, r.loss_scale) for _, r in steps]
        read = torch.stack([torch.stack([*map(Tensor.double, each)]) for each in values]).tolist()
        bad = [
            n
            for n, (loss, norm, skipped, scale) in enumerate(read)
            if (skipped and not _overflowed(loss, norm, scale)) or self._leaps(norm)
        ]
        if not bad or run.step < self.next_step:
            return
        (batch, result), (loss, norm, skipped, _) = steps[bad[-1]], read[bad[-1]]
        number = run.step - len(steps) + 1 + bad[-1]
        cause = f"step {number} had loss {loss:.6g} and gradient norm {norm:.6g}"
        is_exact = bool(skipped) and bad[-1] == len(steps) - 1
        suspect = Suspect(batch, result.loss_scale, loss, norm, is_exact)
        verdict = self._examine(run, cause, suspect)
        if verdict.is_sure:
            raise self._failure(cause, verdict)

    def _leaps(self, norm: float) -> bool:
        """Whether a gradient norm is far above those before; if not, it becomes one of them. (One
        that is not finite is for the guard to judge: float16 may overflow.)"""
        if not math.isfinite(norm):
            return False
        if len(self.norms) > 1 and norm > LEAP * statistics.median(self.norms):
            return True
        self.norms.append(norm)
        return False

    def of_replicas(self, run: Run, found: ReplicasDiffer) -> FaultyMachine:
        """Examine the last step after copies were found to differ. The state is then unusable;
        returns the error that ends the run."""
        make_copies_equal(self.train)
        verdict = self._examine(run, "copies differ", Suspect(run.batch, run.result.loss_scale))
        return self._failure(str(found), verdict)

    def _failure(self, cause: str, verdict: Verdict) -> FaultyMachine:
        # restarted ranks leave an excluded node out only with layouts (start/elastic.py)
        restart_helps = not verdict.is_sure or bool(self.train.config.parallel.layouts)
        return FaultyMachine(f"{cause} ({self._describe(verdict)})", restart_helps)

    def went_back(self, run: Run, start: Start) -> None:
        self.steps.clear()
        self.next_step = min(self.next_step, start.step + PAUSE)  # it may be of an undone step

    def _examine(self, run: Run, cause: str, suspect: Suspect) -> Verdict:
        with run.pause("examination"):
            why = refusal(self.folder, run.step, self.train.mesh.device)
            if not why:
                run.log.event("examining", step=run.step, cause=cause)
            verdict = Verdict(NOT_EXAMINED, why) if why else examine(self.train, suspect)
        self.next_step = run.step + PAUSE
        if dist.get_rank() == 0:
            examined = "" if verdict.verdict == NOT_EXAMINED else "examined: "
            log(f"warning: {cause}; {examined}{self._describe(verdict)}")
            nodes = sorted({self.nodes[rank] for rank in verdict.ranks})
            named = {"nodes": nodes[:MOST], "ranks": verdict.ranks[:MOST]}
            about = {"step": run.step, "cause": cause, **asdict(verdict), **named}
            about["num_ranks"] = len(verdict.ranks)
            run.log.event("suspicion", **about)
            run.for_status["suspicion"] = about
            for node in nodes if verdict.is_sure else []:
                exclude(self.folder, node, f"computes wrongly: {self._describe(verdict)}")
        return verdict

    def _describe(self, verdict: Verdict) -> str:
        where = few(f"rank {rank} on {self.nodes[rank]}" for rank in verdict.ranks)
        return f"{verdict.verdict}{f', {where}' if where else ''}: {verdict.why}"
