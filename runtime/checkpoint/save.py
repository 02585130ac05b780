"""Save checkpoints while training continues.

    training     step 40 ─ copy ─ step 41 ─ step 42 ─ step 43 …    training waits only for the copy
    a thread of each rank     └─ write ─ hash ─ agree ─ commit     (only rank 0 commits)

    partial-…/step-00000040  ──rename──►  step-00000040    no suffix: complete, and all ranks agreed
    step-00000020            ──rename──►  partial-…/step-00000020  ──►  deleted

Each rename goes into or out of the work folder of this run's lease, so a displaced run commits and
deletes nothing (lease.py). "saved" is logged only after the checkpoint has been found under its
final name with the manifest that all ranks agreed on.

The threads have their own process group: ranks that issue the collectives of one group in different
orders wait for each other forever. If anything fails on one rank (a full disk, a folder that became
read-only), all ranks know before anything is committed, and what is reported is that rank's first
error. Training then continues, existing checkpoints stay, and the next save tries again. A save
first waits for the previous one to end.
"""

import contextlib
import errno
import math
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.dataset import Mixture
from errors import RunFailed, UserError, exists
from parallel.placement import local_region, replicated_over
from runtime.agreement import on_all_ranks
from runtime.checkpoint.folder import (
    ABANDONED,
    DAMAGED,
    MANIFEST,
    complete_checkpoints,
    has_command,
    replaceable,
    sync,
)
from runtime.checkpoint.host_copies import host_copies
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import (
    Damaged,
    Manifest,
    Stored,
    check_sizes,
    fingerprint,
    write_manifest,
)
from runtime.checkpoint.tensor_files import DTYPES, Piece, write_pieces
from runtime.checkpoint.verify import check_whole, cover, described, parse_trainer, random_point
from runtime.device import device_thread, seconds_between, time_mark
from runtime.files import write_durably
from runtime.log.run_log import RunLog
from runtime.output import log
from runtime.trainer_state import (
    FILE,
    DataState,
    EarlierDataStage,
    TrainerState,
    held_tensors,
    state_bytes,
    state_of,
)
from training.step import TrainStep


class SaveFailed(RunFailed):
    """A save that some rank could not finish; raised on every rank."""


class Saver:
    """Saves the checkpoints of a run; every rank calls it.

    Args:
        train: holds the weights and moments to be saved.
        data: checkpoints include its tokenizer, with the companion files as they are then.
        lease: the lease of the run folder.
        run_log: gets the event of each save.
    """

    def __init__(self, train: TrainStep, data: Mixture, lease: Lease, run_log: RunLog) -> None:
        self.train, self.data, self.lease, self.log = train, data, lease, run_log
        self.folder = lease.checkpoints
        self.group = dist.new_group(backend="gloo")
        self.has_lost_group = False  # gloo closes connections over which something came too late
        self.is_first = dist.get_rank() == 0
        self.tensors = {held.name: held.tensor for held in held_tensors(train) if not held.is_copy}
        on_all_ranks(self._check_dtypes)  # ranks of other stages may have other states
        # Host copies of the local tensors; allocated at the first save, but on a disk at once, so
        # that its space is reserved.
        self.copies: dict[str, Tensor] = {}
        if folder := train.config.parallel.offload_dir:
            self.copies = host_copies(self._local(), folder)
        self.thread: threading.Thread | None = None
        self.failed: str | None = None  # why the last save failed
        self.last: dict[str, Any] = {}  # the event of the last save that was committed

    def _check_dtypes(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                why = f"checkpoints cannot store {name}, which is {tensor.dtype}"
                remedy = f"let its states_of give one of {', '.join(map(str, DTYPES))}"
                raise UserError("optimizer.name", self.train.config.optimizer.name, why, remedy)

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's part of a checkpoint."""
        return sum(tensor.nbytes for tensor in self._local().values())

    def _local(self) -> dict[str, Tensor]:
        return {name: tensor.to_local() for name, tensor in self.tensors.items()}

    def save(
        self, step: int, tokens: int, data: DataState, earlier: Sequence[EarlierDataStage] = ()
    ) -> None:
        """Save the state after `step` steps. Returns when it has been copied or, with
        checkpoint.async_save=false, when it has been written."""
        began = time.perf_counter()
        self.wait()
        self._renew_group()
        trainer = state_of(
            self.train.config,
            data,
            step=step,
            updates=int(self.train.optimizer.updates.item()),
            tokens=tokens,
            recent_losses=self.train.guard.recent_losses(),
            bad_in_a_row=int(self.train.guard.bad_in_a_row.item()),
            loss_scale=self.train.guard.scale_state(),
            earlier=[*earlier],
        )
        copied = self._copy()  # last: the reads above wait for the device
        stall = time.perf_counter() - began
        self.thread = device_thread(self._write, "save", trainer, copied, stall)
        self.thread.start()
        if not self.train.config.checkpoint.async_save:
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _renew_group(self) -> None:
        """Connect again if the last save lost another rank on any rank."""
        lost = torch.tensor(int(self.has_lost_group))
        dist.all_reduce(lost, op=dist.ReduceOp.MAX)  # one number, over all ranks
        if lost:
            self.group, self.has_lost_group = dist.new_group(backend="gloo"), False

    def close(self) -> None:
        """Wait for the last save, at the end of a run. Raises SaveFailed if it failed."""
        self.wait()
        if self.failed is not None:
            remedy = "correct the cause and start again, from the newest checkpoint"
            raise SaveFailed(f"{self.failed}; {remedy}")

    def _copy(self) -> Callable[[], float]:
        """Copy this rank's tensors to the host, in stream order: after the work already launched on
        the device and before later work.

        Returns a function for the thread: it waits for the copy, and returns the seconds for which
        it kept the device from training. It raises FloatingPointError if a tensor is not finite:
        such a checkpoint must not replace good ones. On a CPU the copy is complete at once, and the
        seconds are 0.
        """
        device = self.train.mesh.device
        begin = time_mark(device)
        self.train.optimizer.wait()
        held = self._local()
        self.copies = self.copies or host_copies(held)
        for name, local in held.items():
            self.copies[name].copy_(local, non_blocking=True)
        end = time_mark(device)

        def copied() -> float:
            seconds = seconds_between(begin, end) if device == "cuda" else 0.0
            for name, copy in self.copies.items():
                # the maximum norm propagates nan
                if copy.numel() and not torch.linalg.vector_norm(copy, math.inf).isfinite():
                    raise FloatingPointError(f"{name} is not finite")
            return seconds

        return copied

    def _write(self, trainer: TrainerState, copied: Callable[[], float], stall: float) -> None:
        """Do everything after the copy, in the thread. Rank 0 logs the outcome."""
        began = time.perf_counter()
        final = self.folder / f"step-{trainer.step:08d}"
        partial: Path | None = None
        record: dict[str, Any] = {"step": trainer.step}
        try:
            stall += max(self._agree(copied))
            partial = self._on_first(lambda: self._prepare(final.name))
            manifest = self._write_partial(partial)
            self._on_first(lambda: self._commit(partial, final, manifest, trainer))
            seconds, size = time.perf_counter() - began, manifest.num_bytes
            stall += 0.0 if self.train.config.checkpoint.async_save else seconds
            record |= {"stall_seconds": stall, "bytes": size, "write_seconds": seconds}
            said = f"saved {final.name}: {size / 1e6:,.1f} MB, written in {seconds:.2f} s; "
            said += f"training waited {stall:.3f} s"
            self.failed, self.last = None, record
        except Exception as error:  # training continues after any failure
            # the others are raised on every rank
            self.has_lost_group = not isinstance(error, SaveFailed)
            if self.is_first and partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            record["failed"] = str(error)
            self.failed = f"the checkpoint of step {trainer.step} was not saved: {error}"
            left = ["not known"]
            with contextlib.suppress(OSError):  # the file system may be what has failed
                left = ["none", *(path.name for path in complete_checkpoints(self.folder))]
            said = f"warning: {self.failed}; the newest is {left[-1]}, "
            said += "and the next save will try again"
        if self.is_first:
            self.lease.check()
            log(said, sys.stderr if self.failed else sys.stdout)
            self.log.event("checkpoint", **record)

    def _write_partial(self, partial: Path) -> Manifest:
        """Write the tensors' files into the work folder. Collective over all ranks' threads."""
        point = self._on_first(random_point)
        held = {
            name: Stored(DTYPES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        }

        def write() -> tuple[Manifest, Counter[str]]:
            """Write this rank's files. Returns what is in them, and what they cover."""
            written, covered = Manifest(files={}, tensors=held), Counter[str]()
            for path in write_pieces(partial, dist.get_rank(), self._mine()):
                sync(path)
                covered += cover(path, written, point)
                written.files[path.name] = fingerprint(path)
            return written, covered

        everyone = self._agree(write)

        def whole() -> Manifest:
            manifest, covered = Manifest(files={}, tensors={}), Counter[str]()
            for theirs, they_cover in everyone:
                manifest.files.update(theirs.files)
                manifest.tensors.update(theirs.tensors)
                covered += they_cover
            check_whole(manifest, covered, point)
            return manifest

        return self._on_first(whole)

    def _mine(self) -> list[tuple[Piece, Tensor]]:
        """The pieces that this rank writes. Of those of which several ranks have copies, each
        writes some: the next largest goes to the one with the fewest bytes. All find the same
        without asking, because they have the same pieces in the same order."""
        mine, loads = [], dict[tuple[str, ...], list[int]]()
        for name, copy in sorted(self.copies.items(), key=lambda each: -each[1].nbytes):
            tensor = self.tensors[name]
            axes = tuple(replicated_over(tensor))
            rank, number = 0, 1  # of those with a copy
            for axis in map(self.train.mesh.views.__getitem__, axes):
                rank, number = rank * axis.size + axis.rank, number * axis.size
            load = loads.setdefault(axes, [0] * number)
            writer = load.index(min(load))
            load[writer] += copy.nbytes
            region = local_region(tensor)
            if writer == rank and all(region):
                offsets = tuple(part.start for part in region)
                mine.append((Piece(name, offsets, tuple(map(len, region))), copy))
        return mine

    def _prepare(self, name: str) -> Path:
        """On rank 0, empty the work folder and make a folder `name` in it."""
        shutil.rmtree(self.lease.work, ignore_errors=True)
        # what a save before could not delete, or was killed before it did: this one needs the room
        self._try("older checkpoints stay", self._prune)
        partial = self.lease.make_work() / name
        partial.mkdir()
        return partial

    def _commit(
        self, partial: Path, final: Path, manifest: Manifest, trainer: TrainerState
    ) -> None:
        """On rank 0, add the tokenizer and trainer state, and make the partial folder a
        checkpoint."""
        try:
            tokenizer = self.data.read_tokenizer()
        except (UserError, OSError) as error:  # the folder may have another one meanwhile
            if not (tokenizer := self.data.tokenizer):
                raise
            log(f"warning: the checkpoint gets the tokenizer that was read before: {error}")
        for name, content in tokenizer.items():
            (partial / name).write_bytes(content)
            sync(partial / name)
        write_durably(partial / FILE, trainer.model_dump_json(indent=1))
        for name in (*tokenizer, FILE):
            manifest.files[name] = fingerprint(partial / name)
        write_manifest(partial, manifest)
        check_sizes(partial, manifest)  # else each failed save would leave a damaged checkpoint
        sync(partial)
        if exists(final):  # someone else put it there: no start leaves what it did not save
            suffix = ABANDONED if exists(final / MANIFEST) else DAMAGED
            aside = self.lease.put_aside(final, suffix).name
            log(f"warning: {final} already existed; it is put aside as {aside}")
        self.lease.move(partial, final)
        sync(self.folder)
        try:
            if described(final)[0] != manifest:
                raise Damaged("its manifest is not the one that was written")
        except (Damaged, OSError):
            self.lease.put_aside(final, DAMAGED)
            raise
        self._try("`latest` is left as it was", self.lease.name_latest)
        self._try("older checkpoints stay", self._prune)

    def _try(self, otherwise: str, action: Callable[..., None], *given: Path) -> None:
        """Do what may fail without the save."""
        try:
            action(*given)
        except Exception as error:
            log(f"warning: {otherwise}: {error}; the next save tries again", sys.stderr)

    def _prune(self) -> None:
        """On rank 0, delete checkpoints beyond checkpoint.keep_last, if the newest can replace
        them: it was saved after a good step, and a failed save has not left it incomplete."""
        keep = self.train.config.checkpoint
        if old := replaceable(self.folder, keep.keep_last, keep.keep_every):
            newest = complete_checkpoints(self.folder)[-1]
            try:
                described(newest)
            except Damaged as problem:
                raise Damaged(f"{newest.name} cannot replace them: {problem}") from None
            for each in () if parse_trainer(newest).bad_in_a_row else old:
                self._try(f"{each.name} is not deleted", self._delete, each)

    def _delete(self, old: Path) -> None:
        """On rank 0, delete a checkpoint unless checkpoint.after_commit runs for it; then a later
        save deletes it."""
        runs_commands = bool(self.train.config.checkpoint.after_commit)
        if runs_commands and has_command(old):
            return
        going = self.lease.work / old.name
        self.lease.move(old, going)
        if runs_commands and has_command(old):  # it has just begun
            self.lease.move(going, old)
        else:
            going.unlink() if going.is_symlink() else shutil.rmtree(going)

    def _agree(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank. Returns the results: on rank 0 of all ranks, elsewhere only
        that of rank 0. If it raises on any rank, SaveFailed is raised on all, with the error of the
        lowest such rank."""
        result, problem = None, ""
        try:
            result = action()
        except Exception as error:
            problem = self._words(error)
        everyone = [("", None)] * dist.get_world_size(self.group)
        dist.gather_object((problem, result), everyone if self.is_first else None, group=self.group)
        problems = [f"on rank {rank}: {said}" for rank, (said, _) in enumerate(everyone) if said]
        of_first = [(problems[:1], result)]
        dist.broadcast_object_list(of_first, group=self.group)
        ((found, result),) = of_first
        if found:
            raise SaveFailed(*found)
        return [theirs for _, theirs in everyone] if self.is_first else [result]

    def _words(self, error: BaseException) -> str:
        if not (isinstance(error, OSError) and error.strerror):
            return f"{type(error).__name__}: {error}".rstrip(": ")
        # that of a write names no file
        said = f"{error.strerror}: {error.filename2 or error.filename or self.folder}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            said += f"; a checkpoint needs {state_bytes(self.train.config) / 1e6:,.1f} MB"
            with contextlib.suppress(OSError):
                said += f", and {shutil.disk_usage(self.folder).free / 1e6:,.1f} MB are free"
        return said

    def _on_first(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; return its result on all ranks, which know if it fails."""
        return self._agree(action if self.is_first else lambda: None)[0]
