"""Runs one case of the parity proof on all ranks, and compares it with the reference.

Each rank returns its local part of every tensor, and the region of the global tensor that it
covers. So assembling the tensors uses no code under test, and reveals missing regions and replicas
that are not equal bit for bit.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from model import largest_logits
from model.config import ModelConfig
from model.initialise import draw_rows
from model.router import routers_of
from parallel import context
from parallel.collectives import by_rank
from parallel.mesh import build_mesh
from parallel.placement import local_region
from proofs.parity.cases import BATCH, BOS, SEED, SEQ_LEN, STEPS, Case
from proofs.parity.reference import IGNORE, Reference
from proofs.parity.reference_experts import FeedForward, auxiliary_losses, experts_of
from proofs.parity.reference_training import Training
from proofs.ranks import RankError, Ranks
from settings.config import DTYPES, Config
from settings.sections import OptimizerConfig
from training.build import build_stages
from training.step import StepResult, TrainStep

# canonical name, region of the global tensor, values; `Choices` are parts too, by layer
Part = tuple[str, tuple[slice, ...], Tensor]
# layer, rows of the global batch and positions in the sequence, experts [rows, positions, k]
Choices = tuple[int, tuple[Tensor, Tensor], Tensor]
Choose = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # BaseRouter.choose
# introduces a bug on a rank (tests/proofs/test_controls.py)
Sabotage = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass
class Run:
    """What a case computed: on one rank, with tensors as lists of `Part`s; or in the reference,
    with whole tensors by name."""

    weights: Any = None
    gradients: Any = None  # of the first step
    final_weights: Any = None
    losses: list[float] = field(default_factory=list)  # of each step
    norms: list[float] = field(default_factory=list)
    # of experts, in the first step: a list of `Choices`; or by layer, [BATCH, SEQ_LEN, k]
    choices: Any = None
    counts: list[list[int]] = field(default_factory=list)  # of a rank's experts, by layer, likewise
    auxiliary: list[float] = field(default_factory=list)  # the two losses of routers, likewise
    biases: dict[str, Tensor] = field(default_factory=dict)  # of routers, after all steps


def global_batch(vocab_size: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [BATCH, SEQ_LEN] of a step. The number of targets differs from row to row,
    and four neighbouring rows have none, so that a mean of means, over ranks or micro-batches, is
    far from the mean. About every sixth token begins a document."""
    generator = torch.Generator().manual_seed(1000 + step)
    text = torch.randint(0, vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
    text[torch.rand(text.shape, generator=generator) < 1 / 6] = BOS
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].clone()
    for row in range(BATCH):
        targets[row, : row * 7 % 13] = IGNORE
    targets[4:8] = IGNORE
    return tokens, targets


@contextlib.contextmanager
def as_in_long_sequences() -> Iterator[None]:
    """Let context parallelism divide the heads, and QK-clip the queries."""
    few = patch.object(largest_logits, "LOGITS_BYTES", 1 << 14)
    with patch.object(context, "LEAST_BYTES", 1), few:
        yield


def make_step(config: Config, device: str = "cpu") -> TrainStep:
    """The training step of this rank, on all ranks of the process group."""
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    mesh = build_mesh(sizes, device, config.model.has_experts)
    return TrainStep(config, mesh, build_stages(config, mesh), BOS)


@contextlib.contextmanager
def recording(step: TrainStep) -> Iterator[list[Choices]]:
    """Record what this rank's tokens choose. Forwards of a stage come in the order of their
    micro-batches. (A recomputation that chooses again is taken for one of them, and has other
    tokens.)"""
    found: list[Choices] = []
    train, parallel, mesh = step.config.train, step.config.parallel, step.mesh
    positions = step.cp.cut(torch.arange(train.seq_len), 0)
    if parallel.sequence_parallel and mesh.tp.size > 1:  # else tp_pieces cuts nothing
        positions = by_rank(positions, mesh.tp.size, parallel.tp_pieces)[mesh.tp.rank]
    height, of_rank = train.micro_batch_size, train.global_batch_size // mesh.batch.size
    starts = range(mesh.batch.rank * of_rank, (mesh.batch.rank + 1) * of_rank, height)

    def recorder(layer: int, choose: Choose) -> Choose:
        first_rows = cycle(starts)

        def recorded(logits: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
            experts, counts = choose(logits, sequences)
            rows = torch.arange(height) + next(first_rows)
            chosen = experts.sort(1).values.unflatten(0, (len(positions), height))
            found.append((layer, (rows[:, None], positions), chosen.transpose(0, 1).double()))
            return experts, counts

        return recorded

    with contextlib.ExitStack() as patches:
        for stage in step.stages.values():
            for layer, router in routers_of(stage):
                recorded = recorder(layer, router.choose)
                patches.enter_context(patch.object(router, "choose", recorded))
        yield found


def run_on_ranks(case: Case, steps: int, sabotage: Sabotage = contextlib.nullcontext) -> Run:
    """Run on each rank `steps` optimizer steps, one or more."""
    with as_in_long_sequences(), sabotage():
        step = make_step(case.config())
        if case.first_bias is not None:
            for stage in step.stages.values():
                for _, router in routers_of(stage):
                    router.set_bias(torch.tensor(case.first_bias))
        size, rank = step.mesh.batch.size, step.mesh.batch.rank
        named = [(weight.global_name, weight.parameter) for weight in step.weights]
        run, forward_backward = Run(weights=parts(named)), step.forward_backward

        def noted(*rows: Tensor) -> tuple[Tensor, Tensor]:
            """The step's own forward and backward, before the update frees the gradients."""
            result = forward_backward(*rows)
            run.gradients = parts((name, p.grad) for name, p in named)
            return result

        def take(index: int) -> StepResult:
            return step(index, *(t.chunk(size)[rank] for t in global_batch(case.vocab_size, index)))

        noting = patch.object(step, "forward_backward", noted)
        with noting, recording(step) as run.choices:
            results = [take(0)]
        results += map(take, range(1, steps))
        run.losses = [result.loss.item() for result in results]
        run.norms = [result.grad_norm.item() for result in results]
        if results[0].loads is not None:
            run.counts = results[0].loads.counts.tolist()
            run.auxiliary = results[0].loads.losses.tolist()
        run.final_weights = parts(named)
        if step.balance is not None:
            run.biases = {name: bias.to_local() for name, bias in step.balance.tensors()}
    return run


def parts(tensors: Iterable[tuple[str, Tensor | None]]) -> list[Part]:
    """This rank's part of each tensor. A missing tensor is left out, and is detected when the parts
    are assembled."""
    mine = []
    for name, tensor in tensors:
        if isinstance(tensor, DTensor):
            region = tuple(slice(part.start, part.stop) for part in local_region(tensor))
            mine.append((name, region, tensor.detach().to_local().clone()))
    return mine


def assemble(
    runs: list[list[Any]], shapes: dict[Any, torch.Size]
) -> tuple[dict[Any, Tensor], float]:
    """Assemble the global tensors from all ranks' parts, and return them with the largest
    difference between two copies of an element. An element that no rank holds is NaN."""
    whole: dict[Any, Tensor] = {}
    spread = 0.0
    for name, region, numbers in (part for run in runs for part in run):
        if name not in whole:
            whole[name] = torch.full(shapes[name], math.nan, dtype=numbers.dtype)
        place = whole[name][region]
        known = ~place.isnan()
        if known.any():
            spread = worst([spread, (place[known] - numbers[known]).abs().max().item()])
        whole[name][region] = numbers
    return whole, spread


def reference_model(
    model: ModelConfig, dtype: torch.dtype, seed: int, bos_id: int | None = None
) -> Reference:
    """The unsharded model with the weights that every layout must start from; each global tensor is
    drawn as a whole.

    Vectors are as the reference makes them (of norms, ones). Matrices are normally distributed; the
    standard deviation of those that write into the residual stream is divided by sqrt(2 · layers).
    """
    reference = Reference(model, bos_id).to(dtype)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if p.ndim > 1:
                writes = name.endswith(("attention.output.weight", "down.weight"))
                std = model.init_std / math.sqrt(2 * model.num_layers) if writes else model.init_std
                p.copy_(draw_rows(name, p.shape, range(p.shape[0]), std, seed))
    return reference


def expected(case: Case, steps: int) -> Run:
    """The reference's results for a case, computed once for all cases that differ only in the
    layout."""
    config = case.config()
    model = replace(config.model, kernels="torch")
    bos_id = BOS if case.document_mask else None
    about = config.optimizer, case.dtype, bos_id, case.first_bias
    return _expected(model, *about, steps, global_batch)


@functools.lru_cache(maxsize=64)
def _expected(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    dtype: str,
    bos_id: int | None,
    first_bias: tuple[float, ...] | None,
    steps: int,
    global_batch: Callable[[int, int], tuple[Tensor, Tensor]],  # tests exchange it
) -> Run:
    reference = reference_model(model, DTYPES[dtype], SEED, bos_id)
    if first_bias is not None:
        for layer in experts_of(reference):
            layer.bias = torch.tensor(first_bias)
    run = Run({name: p.detach().clone() for name, p in reference.named_parameters()})
    feed_forwards = dict(enumerate(block.feed_forward for block in reference.blocks))
    experts = {at: each for at, each in feed_forwards.items() if isinstance(each, FeedForward)}
    training = Training(reference, optimizer, STEPS)
    for step in range(steps):
        loss, norm = training.forward_backward(*global_batch(model.vocab_size, step))
        if step == 0:
            run.gradients = {name: p.grad.clone() for name, p in reference.named_parameters()}
            run.auxiliary = auxiliary_losses(reference).tolist()
            run.choices = {layer: each.choices for layer, each in experts.items()}
        training.update(step, norm)
        run.losses.append(loss)
        run.norms.append(norm)
    run.final_weights = {name: p.detach() for name, p in reference.named_parameters()}
    run.biases = {f"blocks.{at}.feed_forward.router.bias": e.bias for at, e in experts.items()}
    return run


# --- the comparison ---

# The errors of a case against the reference, relative: ‖a − b‖ / ‖b‖ (NaN: a is missing), and their
# bounds in float64 and in float32. In float64, rounding errors are so small that they hide no bug.
# Float32 rounds at 6e-8, and Adam, which divides by the gradient's size, amplifies that in each
# step.
_BOUNDS = {
    "weights": (0.0, 0.0),  # initial ones, of the worst parameter: equal bit for bit
    # the largest difference between copies; infinite if ranks report different losses or norms
    "spread": (0.0, 0.0),
    "loss": (1e-11, 1e-5),  # of the first step, as the next two
    "norm": (1e-11, 1e-5),
    "gradient": (1e-11, 1e-4),  # of the worst parameter
    "loss_steps": (1e-9, 1e-4),  # the worst of later steps
    "norm_steps": (1e-9, 1e-4),
    "updated": (1e-9, 1e-4),  # weights after all steps, of the worst parameter
    # tokens that chose other experts, layers with other counts, and one if ranks differ
    "routes": (0.0, 0.0),
    "balance": (1e-11, 1e-5),  # the losses of routers
    "bias": (0.0, 0.0),  # the largest difference, after all steps
}
BOUNDS: dict[str, dict[str, float]] = {
    dtype: {name: bounds[at] for name, bounds in _BOUNDS.items()}
    for at, dtype in enumerate(("float64", "float32"))
}


@dataclass
class Row:
    """What the comparison of a case has found."""

    case: Case
    steps: int  # how many optimizer steps were compared
    errors: dict[str, float] = field(default_factory=dict)  # by the names of `BOUNDS`
    worst: str = ""  # the parameter with the error `gradient`
    seconds: float = 0.0
    crash: str = ""  # the ranks' messages, if they did not finish

    def failures(self) -> list[str]:
        """The names of the errors that are out of bounds."""
        if self.crash:
            return ["crash"]
        bounds = BOUNDS[self.case.dtype]
        return [name for name, bound in bounds.items() if not self.errors[name] <= bound]

    def __str__(self) -> str:
        bad = self.failures()
        text = f"{'FAIL' if bad else 'ok':4} {self.seconds:5.1f} s  "
        if self.crash:
            return f"{text}{self.case}\n{self.crash}"
        text += " ".join(f"{name} {error:.0e}" for name, error in self.errors.items())
        text += f" ({self.worst}) after {self.steps} steps  {self.case}"
        return f"{text}\n     out of bounds: {', '.join(bad)}" if bad else text

    def as_json(self) -> dict[str, Any]:
        """All that was found, with the options of the case and its layout; null for what is no
        number, or infinite."""
        layout = {**self.case.layout.by_axis(), "ep": self.case.layout.ep}
        found = {**layout, **vars(self.case), **vars(self), **self.errors}
        found["failures"] = self.failures()
        for structure in ("layout", "case", "errors"):
            del found[structure]
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in found.items()
        }


def compare(case: Case, runs: list[Run], reference: Run) -> Row:
    """Compare the results of all ranks with the reference."""
    shapes = {name: weight.shape for name, weight in reference.weights.items()}
    weights, gradients, final = (
        assemble([getattr(run, kind) for run in runs], shapes)
        for kind in ("weights", "gradients", "final_weights")
    )
    spread, first = worst([weights[1], gradients[1], final[1]]), runs[0]
    if any((run.losses, run.norms) != (first.losses, first.norms) for run in runs):
        spread = math.inf
    of_gradients = errors_of(gradients[0], reference.gradients)
    worst_name = max(of_gradients, key=lambda name: size(of_gradients[name]))
    errors = {
        "weights": worst(errors_of(weights[0], reference.weights).values()),
        "spread": spread,
        "loss": relative(first.losses[:1], reference.losses[:1]),
        "norm": relative(first.norms[:1], reference.norms[:1]),
        "gradient": of_gradients[worst_name],
        "loss_steps": relative(first.losses[1:], reference.losses[1:]),
        "norm_steps": relative(first.norms[1:], reference.norms[1:]),
        "updated": worst(errors_of(final[0], reference.final_weights).values()),
        **errors_of_routing(case, runs, reference),
    }
    return Row(case, len(reference.losses), errors, worst_name)


def errors_of_routing(case: Case, runs: list[Run], reference: Run) -> dict[str, float]:
    """Compare the experts that tokens chose, how many chose each, the losses of routers and their
    biases."""
    shapes = {layer: choices.shape for layer, choices in reference.choices.items()}
    chosen, spread = assemble([run.choices for run in runs], shapes)
    routes = int(spread > 0)
    for layer, choices in reference.choices.items():
        ours = chosen.get(layer, torch.tensor(math.nan))
        routes += int((ours != choices).any(-1).sum())
        counts = torch.bincount(choices.flatten(), minlength=case.num_experts).tolist()
        routes += sum(run.counts[layer] != counts for run in runs)
    biases = [
        (bias - reference.biases[name]).abs().max().item()
        for run in runs
        for name, bias in run.biases.items()
    ]
    balance = worst(relative(run.auxiliary, reference.auxiliary) for run in runs if shapes)
    return {"routes": routes, "balance": balance, "bias": worst(biases)}


def size(error: float) -> tuple[bool, float]:
    """By which errors are compared: NaN is larger than any number."""
    return math.isnan(error), error


def worst(errors: Iterable[float]) -> float:
    return max(errors, key=size, default=0.0)


def relative(ours: list[float], theirs: list[float]) -> float:
    """The largest relative error; where theirs is 0, the absolute one."""
    return worst(abs(a - b) / (abs(b) or 1.0) for a, b in zip(ours, theirs, strict=True))


def errors_of(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    return {name: error_of(ours.get(name), tensor) for name, tensor in theirs.items()}


def error_of(ours: Tensor | None, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖ (the numerator if theirs is 0), or NaN if ours is missing."""
    if ours is None:
        return math.nan
    difference = (ours.double() - theirs.double()).norm().item()
    length = theirs.double().norm().item()
    return difference / length if length else difference


def check(
    ranks: Ranks, case: Case, steps: int = 1, sabotage: Sabotage = contextlib.nullcontext
) -> Row:
    """Run a case on the ranks and compare it with the reference."""
    started = time.perf_counter()
    try:
        runs = ranks.run(run_on_ranks, case.world, case, steps, sabotage)
        row = compare(case, runs, expected(case, steps))
    except RankError as error:
        row = Row(case, steps, crash=str(error))
    row.seconds = time.perf_counter() - started
    return row
