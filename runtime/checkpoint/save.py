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
import json
import math
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from data.dataset import Mixture
from errors import RunFailed, UserError, exists
from parallel.disk import ranges_of_size
from runtime.checkpoint.folder import (
    ABANDONED,
    DAMAGED,
    MANIFEST,
    complete_checkpoints,
    has_command,
    step_of,
    sync,
)
from runtime.checkpoint.host_copies import host_copies
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import (
    PLACES,
    TENSORS,
    Damaged,
    Dtype,
    Manifest,
    Stored,
    check_sizes,
    fingerprint,
    read_manifest,
    write_manifest,
)
from runtime.checkpoint.placed import Placed
from runtime.checkpoint.verify import check_whole, cover, random_point
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

FILE_BYTES = 1 << 30  # of a file, unless a single tensor has more: files are checked in parallel
# the names that safetensors uses
DTYPES: dict[Any, Dtype] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


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
        # Host copies of the local tensors; allocated at the first save, but on a disk at once, so
        # that its space is reserved.
        self.copies: dict[str, Tensor] = {}
        if folder := train.config.parallel.offload_dir:
            self.copies = host_copies(self._local(), folder)
        self.thread: threading.Thread | None = None
        self.failed: str | None = None  # why the last save failed
        self.last: dict[str, Any] = {}  # the event of the last save that was committed

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
            self.has_lost_group = not isinstance(error, SaveFailed | Damaged)
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
        tensors = {name: Placed(copy, self.tensors[name]) for name, copy in self.copies.items()}
        writer = FilesOfSomeSize(partial)
        self._agree(lambda: dcp.save(tensors, storage_writer=writer, process_group=self.group))
        mine = {name: Stored(DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        point = self._agree(random_point)[0]

        def describe() -> tuple[Manifest, Counter[str]]:
            """What is in the files that this rank wrote, and what they cover."""
            written, covered = Manifest(files={}, tensors=mine), Counter[str]()
            for path in writer.files:
                sync(path)
                covered += cover(path, written, point)
                written.files[path.name] = fingerprint(path)
            return written, covered

        manifest, covered = Manifest(files={}, tensors={}), Counter[str]()
        for theirs, they_cover in self._agree(describe):
            manifest.files.update(theirs.files)
            manifest.tensors.update(theirs.tensors)
            covered += they_cover
        check_whole(manifest, covered, point)
        return manifest

    def _prepare(self, name: str) -> Path:
        """On rank 0, empty the work folder and make a folder `name` in it."""
        shutil.rmtree(self.lease.work, ignore_errors=True)
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
            found = read_manifest(final)
            check_sizes(final, found)
            if found != manifest:
                raise Damaged("its manifest is not the one that was written")
        except (Damaged, OSError):
            self.lease.put_aside(final, DAMAGED)
            raise
        self._tidy(final.name, good=trainer.bad_in_a_row == 0)

    def _tidy(self, name: str, good: bool) -> None:
        """On rank 0, name the newest checkpoint in `latest`, and, if it is `good`, let it replace
        those beyond checkpoint.keep_last. If that fails, `name` is saved all the same."""
        keep = self.train.config.checkpoint
        try:
            self.lease.name_latest()
            # the one just saved is the newest (see `find_start`)
            for old in complete_checkpoints(self.folder)[: -keep.keep_last] if good else ():
                if not keep.keep_every or step_of(old) % keep.keep_every:
                    self._delete(old)
        except Exception as error:
            about = f"older checkpoints or `latest` are left as they were: {error}"
            log(f"warning: {name} is saved, but {about}; the next save tries again", sys.stderr)

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
        """Run `action` and return the results of all ranks. If it raises on any rank, SaveFailed is
        raised on all, with the error of the lowest such rank."""
        result, problem = None, ""
        try:
            result = action()
        # raised by DCP on all ranks, with the failures of each; not a subclass of Exception
        except dcp.CheckpointException as error:
            if failure := error.failures.get(dist.get_rank()):
                problem = self._words(failure[0])
        except Exception as error:
            problem = self._words(error)
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, (result, problem), group=self.group)
        for rank, (_, said) in enumerate(everyone):
            if said:
                raise SaveFailed(f"on rank {rank}: {said}")
        return [theirs for theirs, _ in everyone]

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


class FilesOfSomeSize(HuggingFaceStorageWriter):
    """Writes a rank's part to `files` of about FILE_BYTES each, straight from the tensors. (DCP has
    safetensors make two copies of a file in memory, which holds Python's lock: for a file of 1 GB,
    training could launch nothing for almost a second.)"""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.files: list[Path] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = [cast(Tensor, planner.resolve_data(item)) for item in plan.items]
        parts = [*ranges_of_size([tensor.nbytes for tensor in tensors], FILE_BYTES)]
        for number, part in enumerate(parts, start=1):
            name = f"shard-{dist.get_rank() + 1:05d}-model-{number:05d}-of-{len(parts):05d}"
            self.files.append(Path(self.path, name + TENSORS))
            with self.fs.create_stream(self.files[-1], "wb") as file:
                write_tensors(file, {plan.items[i].index: tensors[i] for i in part})
        written: Future[list[WriteResult]] = Future()
        written.set_result([])  # of which DCP would make an index; the manifest is ours
        return written


def write_tensors(file: Any, tensors: Mapping[MetadataIndex, Tensor]) -> None:
    """Write a safetensors file (https://github.com/huggingface/safetensors#format) of pieces on the
    host, and where they begin (manifest.py reads it)."""
    # the widest first, so that each begins at a multiple of its width
    pieces = sorted(tensors.items(), key=lambda piece: -piece[1].itemsize)
    about = dict[str, Any]()
    end = 0
    for index, tensor in pieces:
        begin, end = end, end + tensor.nbytes
        dtype, shape = DTYPES[tensor.dtype], tensor.shape
        about[index.fqn] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    places = {index.fqn: {"saved_offsets": index.offset} for index in tensors}
    header = json.dumps({"__metadata__": {PLACES: json.dumps(places)}, **about}).encode()
    header += b" " * (-len(header) % 8)  # the numbers begin at a multiple of 8
    file.write(len(header).to_bytes(8, "little") + header)
    for _, tensor in pieces:
        file.write(tensor.flatten().view(torch.uint8).numpy())
