"""One training step: micro-batches through the schedule → norm → guard → clipped update."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from model.documents import Documents, find_documents
from model.transformer import Batch, Transformer, hidden_shape
from parallel.context import ContextParallel
from parallel.data import check_reduced, data_parallel
from parallel.layer import TensorParallel
from parallel.mesh import Mesh, to_device
from parallel.parameter import weights_of
from parallel.partial import sum_over_tp
from parallel.pipeline.actions import forward_only
from parallel.pipeline.lower import Program, lower
from parallel.pipeline.runner import PipelineRunner, Recorder
from parallel.pipeline.tied import first_and_last_stage_group, sum_tied_gradients
from parallel.pipeline.transfer import Transfers
from settings.config import Config
from tokens import IGNORE
from training.balance import Balance, Loads
from training.gradient import gradient_norm, unscale
from training.guard import UpdateGuard
from training.learning_rate import learning_rate
from training.qk_clip import QKClip
from training.update import Update


@dataclass(frozen=True)
class StepResult:
    """The results of a step. All but lr are on the device; reading them waits for the step, so only
    the logger does."""

    lr: float
    loss: Tensor  # mean over all target tokens of the global batch, the same on every rank
    grad_norm: Tensor  # before clipping
    updates: Tensor  # number of updates so far: steps minus those that the guard skipped
    bad_in_a_row: Tensor  # number of consecutive bad steps, up to this one
    loss_scale: Tensor  # by which this step's loss was multiplied (training/guard.py)
    loads: Loads | None  # of experts; None: the model has none
    largest_logit: Tensor | None  # None: not measured in this step (training/qk_clip.py)


class TrainStep:
    """Holds all that a step needs, and runs it: `TrainStep(config, mesh, stages, bos_id)(step,
    tokens, targets)`.

    Args:
        bos_id: the token that begins a document, for data.document_mask.
        phase: the steps over which the learning rate is scheduled; None: the whole run.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        stages: dict[int, Transformer],
        bos_id: int | None = None,
        phase: range | None = None,
    ) -> None:
        assert bos_id is not None or not config.data.document_mask
        self.config, self.mesh, self.stages = config, mesh, stages
        self.bos_id = bos_id if config.data.document_mask else None
        self.precision = config.precision
        self.phase = range(config.train.steps) if phase is None else phase
        parallel, train = config.parallel, config.train
        # Listed once, while they are sharded: while its weights are gathered, a module has other
        # objects as its parameters.
        self.weights = [weight for stage in stages.values() for weight in weights_of(stage)]
        self.tied, self.tied_group = [], None
        if config.model.tie_embeddings:
            self.tied = [each for each in self.weights if each.global_name == "embedding.weight"]
            self.tied_group = first_and_last_stage_group(mesh.root, parallel.ranks_of_stages)
        self.optimizer = Update(self.weights, config)
        self.balance = Balance(config, mesh, stages) if config.model.has_experts else None
        self.qk_clip = QKClip(config, mesh, stages, self.weights) if config.clips_logits else None
        scales_loss = self.precision.compute == torch.float16
        self.guard = UpdateGuard(config.guard.spike_sigmas, mesh.device, scales_loss)
        self.kernels = config.kernels_of_states
        self.record: Recorder = nullcontext

        self.tp = TensorParallel.of(mesh, parallel.sequence_parallel)
        self.cp = ContextParallel.of(mesh)
        transfers = self.transfers(train.seq_len, train.micro_batch_size)
        self.program = lower(config.schedule(mesh.batch.size))[mesh.pp.rank]
        self.forward_programs: dict[int, Program] = {}  # by number of micro-batches
        compute, reduce = self.precision.compute, self.precision.reduce
        data = data_parallel(stages.values(), parallel.zero_stage, compute, reduce)
        self.runner = PipelineRunner(stages, parallel.num_stages, transfers, data)

    def __call__(self, step: int, tokens: Tensor, targets: Tensor) -> StepResult:
        """Run one step on this data-parallel rank's rows of the global batch, tokens and targets
        [rows, S]; `step` is 0-based."""
        if self.qk_clip is not None:
            self.qk_clip.begin(step)
        loss, norm = self.forward_backward(tokens, targets)
        lr = learning_rate(step, self.phase, self.config.optimizer)
        scale = self.guard.loss_scale  # before the guard changes it
        norm_or_inf = self.guard(loss, norm)  # inf: the optimizer changes nothing
        self.optimizer.step(lr, norm_or_inf, self.config.optimizer.grad_clip)
        loads = None if self.balance is None else self.balance(norm_or_inf)
        logit = None if self.qk_clip is None else self.qk_clip(norm_or_inf)
        updates, bad = self.optimizer.updates, self.guard.bad_in_a_row
        return StepResult(lr, loss, norm, updates, bad, scale, loads, logit)

    def forward_backward(
        self, tokens: Tensor, targets: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the reduced gradients of the mean loss over the global batch's target tokens, in
        the parameters; returns this loss and the gradient norm. `deterministic`: also if
        train.deterministic is false."""
        # The loss is divided by the token count here; every later reduction is a plain sum. (A mean
        # per rank, then a mean over ranks, would be wrong as soon as token counts differ.) The
        # scale is 1, except with float16: then `unscale` divides the reduced gradients by it.
        scale = self.guard.loss_scale.to(self.precision.exact)
        loss_scale = scale / self.count_targets(targets)
        microbatches = self.microbatches(tokens, targets, loss_scale, deterministic)
        if self.balance is not None:
            self.balance.begin(scale)
        loss = self.runner.run(self.program, microbatches, self.record)
        check_reduced(weight.parameter for weight in self.weights)
        sum_over_tp(self.weights, self.mesh.tp.group)
        sum_tied_gradients(self.tied, self.tied_group)
        # The second copy of a tied embedding has the same gradient as the first, and must not count
        # again in the norm.
        gradients = [weight.gradient for weight in self.weights if not weight.is_copy]
        if self.guard.scales_loss:
            unscale([weight.gradient for weight in self.weights], scale)
        norm = gradient_norm(gradients, self.mesh, self.kernels)
        loss = self.sum_over_ranks(loss)
        return (loss / scale if self.guard.scales_loss else loss), norm

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss and the number of target tokens over the rows, [rows, S], of all
        data-parallel ranks."""
        num_targets = self.count_targets(targets)
        microbatches = self.microbatches(tokens, targets, torch.ones_like(num_targets))
        loss = self.runner.run(self.forward_program(len(microbatches)), microbatches)
        return self.sum_over_ranks(loss), num_targets

    def transfers(self, length: int, sequences: int) -> Transfers:
        """Transfers between stages, for micro-batches of so many sequences of `length` tokens."""
        shape = hidden_shape(self.config.model, length, sequences, self.tp, self.cp)
        return Transfers(self.mesh.pp.group, shape, self.precision.compute, self.mesh.device)

    def forward_program(self, num_microbatches: int) -> Program:
        """This rank's program of an evaluation."""
        if num_microbatches not in self.forward_programs:
            programs = lower(forward_only(self.config.parallel.ranks_of_stages, num_microbatches))
            self.forward_programs[num_microbatches] = programs[self.mesh.pp.rank]
        return self.forward_programs[num_microbatches]

    def count_targets(self, targets: Tensor) -> Tensor:
        """The number of target tokens in the global batch, summed over data-parallel ranks: a
        scalar in the dtype of the loss."""
        num_targets = to_device((targets != IGNORE).sum(), self.mesh.device)
        dist.all_reduce(num_targets, group=self.mesh.batch.group)  # of whole rows
        return num_targets.to(self.precision.exact)

    def microbatches(
        self, tokens: Tensor, targets: Tensor, loss_scale: Tensor, deterministic: bool = False
    ) -> list[Batch]:
        """Split [rows, S] into micro-batches of this cp rank's [S/cp, micro_batch_size], on the
        device."""
        size, length = self.config.train.micro_batch_size, self.config.train.seq_len
        deterministic |= self.config.train.deterministic
        # [S, 1]
        positions = torch.arange(length, device=self.mesh.device).unsqueeze(1)
        places: list[tuple[Tensor, Sequence[Documents] | None]]  # of each micro-batch
        places = [(positions, None)] * (len(tokens) // size)
        if self.bos_id is not None:
            about = self.mesh.device, self.cp.chunks(length), self.config.train.compile
            places = [find_documents(rows, self.bos_id, *about) for rows in tokens.split(size)]
        # Targets were shifted, and documents found, in whole rows. Only now are rows cut.
        tokens, targets = (
            to_device(self.cp.cut(t, 1), self.mesh.device) for t in (tokens, targets)
        )
        cut = zip(tokens.split(size), targets.split(size), places, strict=True)
        return [
            Batch(
                t.T.contiguous(), y.T.contiguous(), self.cp.cut(p, 0), loss_scale, d, deterministic
            )
            for t, y, (p, d) in cut
        ]

    def sum_over_ranks(self, loss: Tensor | None) -> Tensor:
        """The losses of the last stages, summed over data-parallel and cp ranks, on every rank."""
        if loss is None:
            loss = torch.zeros((), dtype=self.precision.exact, device=self.mesh.device)
        for view in (self.mesh.loss, self.mesh.pp):  # tp ranks already have the same loss
            dist.all_reduce(loss, group=view.group)
        return loss
