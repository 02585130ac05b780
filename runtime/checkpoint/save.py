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

import json
import math
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from data.tokenizer import tokenizer_files
from model.transformer import num_parameters
from parallel.placement import as_dtensor_like
from runtime.checkpoint.host_copies import host_copies
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import held_tensors
from runtime.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    Manifest,
    check_sizes,
    check_whole,
    cover,
    fingerprint,
    read_manifest,
    write_durably,
    write_manifest,
)
from runtime.checkpoint.names import complete_checkpoints, has_command, step_of
from runtime.checkpoint.run_folder import (
    checkpoint_folder,
    name_latest,
    put_aside,
    sync_folder,
)
from runtime.checkpoint.save_errors import SaveFailed, agree, room
from runtime.checkpoint.tiling import random_point
from runtime.checkpoint.trainer_state import FILE, model_entries
from runtime.device import DeviceClock, device_thread
from runtime.log.run_log import RunLog
from runtime.messages import log
from training.optimizers import state_bytes
from training.step import TrainStep

# the names that safetensors uses
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


class Saver:
    """Saves the checkpoints of a run; every rank calls it.

    Args:
        train: holds the weights and moments to be saved.
        tokenizer: the tokenizer's file; checkpoints include a copy, with its companion files.
        lease: the lease of the run folder.
        run_log: gets the event of each save.
    """

    def __init__(self, train: TrainStep, tokenizer: Path, lease: Lease, run_log: RunLog) -> None:
        self.train, self.tokenizer, self.lease, self.log = train, tokenizer, lease, run_log
        self.folder = checkpoint_folder(train.config)
        self.group = dist.new_group(backend="gloo")
        self.tensors = {held.name: held.tensor for held in held_tensors(train) if not held.is_copy}
        # host copies of the local tensors; allocated at the first save
        self.copies: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.failed: str | None = None  # why the last save failed
        self.last: dict[str, Any] = {}  # the event of the last save that was committed

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's part of a checkpoint."""
        return sum(tensor.to_local().nbytes for tensor in self.tensors.values())

    def save(
        self,
        step: int,
        tokens: int,
        data_state: dict[str, Any],
        other_stages: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Save the state after `step` steps. Returns when it has been copied or, with
        checkpoint.async_save=false, when it has been written. `other_stages`: entries for
        trainer.json about the stages before and after (history.py)."""
        began = time.perf_counter()
        self.wait()
        config = self.train.config
        trainer = {
            "step": step,
            # fewer than steps if some were skipped
            "updates": int(self.train.optimizer.updates.item()),
            "tokens": tokens,
            "seed": config.train.seed,
            "optimizer": config.optimizer.name,
            "seq_len": config.train.seq_len,
            "recent_losses": self.train.guard.recent_losses(),
            "bad_in_a_row": int(self.train.guard.bad_in_a_row.item()),
            "model": model_entries(config.model),
            "data": data_state,
            **other_stages,
        }
        copied = self._copy()  # last: the reads above wait for the device
        stall = time.perf_counter() - began
        self.thread = device_thread(self._write, "save", step, trainer, copied, stall)
        self.thread.start()
        if not config.checkpoint.async_save:
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def close(self) -> None:
        """Wait for the last save, at the end of a run. Raises SaveFailed if it failed."""
        self.wait()
        if self.failed is not None:
            remedy = "correct the cause and start again, from the newest checkpoint"
            raise SaveFailed(f"{self.failed}; {remedy}")

    def _copy(self) -> Callable[[], float]:
        """Copy this rank's tensors to the host, in stream order: after the work already launched on
        the device and before later work. Returns a function that waits for the copy, and returns
        the seconds for which it kept the device from training. On a CPU this is a plain copy,
        complete on return, and the seconds are 0."""
        clock = DeviceClock() if self.train.mesh.device == "cuda" else None
        held = {name: tensor.to_local() for name, tensor in self.tensors.items()}
        self.copies = self.copies or host_copies(held)
        for name, local in held.items():
            self.copies[name].copy_(local, non_blocking=True)
        return clock.stop() if clock is not None else lambda: 0.0

    def _write(
        self, step: int, trainer: dict[str, Any], copied: Callable[[], float], stall: float
    ) -> None:
        """Do everything after the copy, in the thread. Rank 0 logs the outcome."""
        began = time.perf_counter()
        final = self.folder / f"step-{step:08d}"
        partial: Path | None = None
        record: dict[str, Any] = {"step": step}
        try:
            stall += copied()
            self._agree(self._require_finite)
            partial = self._agree(lambda: self._prepare(final.name) if self._is_first else None)[0]
            manifest = self._write_partial(partial, trainer)
            good = trainer["bad_in_a_row"] == 0  # else it must not replace older checkpoints
            self._agree(
                lambda: (
                    self._commit(partial, final, manifest, deletes=good) if self._is_first else None
                )
            )
            seconds, size = time.perf_counter() - began, manifest.num_bytes
            stall += 0.0 if self.train.config.checkpoint.async_save else seconds
            record |= {"stall_seconds": stall, "bytes": size, "write_seconds": seconds}
            said = (
                f"saved {final.name}: {size / 1e6:,.1f} MB, written in {seconds:.2f} s; "
                f"training waited {stall:.3f} s"
            )
            self.failed, self.last = None, record
        except Exception as error:  # training continues after any failure
            if self._is_first and partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            config = self.train.config
            needed = self.last.get("bytes") or num_parameters(config.model) * state_bytes(config)
            record["failed"] = f"{error}{room(error, self.folder, needed)}"
            self.failed = f"the checkpoint of step {step} was not saved: {record['failed']}"
            there = complete_checkpoints(self.folder) if self.folder.is_dir() else []
            left = [path.name for path in there]
            said = (
                f"warning: {self.failed}; the newest is {left[-1] if left else 'none'}, "
                "and the next save will try again"
            )
        if self._is_first:
            self.lease.check()
            log(said, sys.stderr if self.failed else sys.stdout)
            self.log.event("checkpoint", **record)

    def _require_finite(self) -> None:
        """Raise if a tensor is not finite: such a checkpoint must not replace good ones."""
        for name, copy in self.copies.items():
            # the maximum norm propagates nan
            if copy.numel() and not torch.linalg.vector_norm(copy, math.inf).isfinite():
                raise FloatingPointError(f"{name} is not finite")

    def _write_partial(self, partial: Path, trainer: dict[str, Any]) -> Manifest:
        """Write all files but the manifest into the work folder. Collective over the threads of all
        ranks."""
        tensors = {
            name: as_dtensor_like(copy, self.tensors[name]) for name, copy in self.copies.items()
        }
        # This thread writes the rank's file: DCP loses the errors of further ones.
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True, thread_count=1)
        # Else it would load the tensors, which are on the host already, through a stream of the
        # device, and synchronize that.
        writer.per_thread_copy_ahead = 0
        self._agree(lambda: dcp.save(tensors, storage_writer=writer, process_group=self.group))
        mine = {name: (DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}

        point = self._agree(random_point)[0]

        def describe() -> tuple[dict[str, tuple[int, str]], Counter[str]]:
            """Return the fingerprints of the files that this rank wrote, and what they cover."""
            begin = f"shard-{dist.get_rank() + 1:05d}-"
            # unlike glob, this raises if the folder is gone
            paths = [path for path in partial.iterdir() if path.name.startswith(begin)]
            covered: Counter[str] = Counter()
            for path in paths:
                covered += cover(path, Manifest({}, mine), point)
            return {path.name: fingerprint(path) for path in paths}, covered

        files: dict[str, tuple[int, str]] = {}
        covered: Counter[str] = Counter()
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for (theirs, they_cover), their_shapes in zip(
            self._agree(describe), self._agree(lambda: mine), strict=True
        ):
            files |= theirs
            covered += they_cover
            shapes |= their_shapes
        manifest = Manifest(files, shapes)
        check_whole(manifest, covered, point)

        def add_small_files() -> None:
            """On rank 0, add the tokenizer and the trainer state."""
            tokenizer = tokenizer_files(self.tokenizer)
            for name, path in tokenizer.items():
                shutil.copyfile(path, partial / name)
            write_durably(partial / FILE, json.dumps(trainer, indent=1))
            manifest.files.update(
                {name: fingerprint(partial / name) for name in (*tokenizer, FILE)}
            )

        self._agree(add_small_files if self._is_first else lambda: None)
        return manifest

    def _prepare(self, name: str) -> Path:
        """On rank 0, empty the work folder and make a folder `name` in it."""
        shutil.rmtree(self.lease.work, ignore_errors=True)
        partial = self.lease.make_work() / name
        partial.mkdir()
        return partial

    def _commit(self, partial: Path, final: Path, manifest: Manifest, deletes: bool) -> None:
        """On rank 0, turn the partial folder into a checkpoint.

        deletes: whether older checkpoints beyond checkpoint.keep_last are then deleted.
        """
        write_manifest(partial, manifest)
        sync_folder(partial)
        # Someone else put it there: no start leaves incomplete or later checkpoints in place.
        if final.exists():
            suffix = ".abandoned" if (final / MANIFEST).exists() else ".damaged"
            log(
                f"warning: {final} already existed; it is put aside as "
                f"{put_aside(self.lease, final, suffix).name}"
            )
        self.lease.move(partial, final)
        sync_folder(self.folder)
        try:
            found = read_manifest(final)
            check_sizes(final, found)
            if found != manifest:
                raise Damaged("its manifest is not the one that was written")
        except Damaged:
            put_aside(self.lease, final, ".damaged")
            raise
        name_latest(self.lease)
        if not deletes:
            return
        keep = self.train.config.checkpoint
        # this one is the newest (see `find_start`)
        for old in complete_checkpoints(self.folder)[: -keep.keep_last]:
            if not keep.keep_every or step_of(old) % keep.keep_every:
                self._delete(old)

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
            shutil.rmtree(going)

    def _agree(self, action: Callable[[], Any]) -> list[Any]:
        return agree(action, self.group, self.folder)

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == 0
