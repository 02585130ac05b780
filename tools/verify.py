"""Verifies that a checkpoint is intact: `python -m tools.verify CHECKPOINT`

Reads every file of it, compares each with the checksum in manifest.json, and checks that the pieces
of every tensor cover it, and that trainer.json has the expected entries. CHECKPOINT is a step-…
folder, or a run folder, all of whose checkpoints are verified, also one without a manifest. Nothing
is unpickled, and no weights are loaded. The exit status is 1 if any checkpoint is damaged.
"""

from pathlib import Path

from errors import exists
from runtime.checkpoint.folder import checkpoints_of, named_checkpoints
from runtime.checkpoint.manifest import Damaged
from runtime.checkpoint.verify import verify_checkpoint
from tools.command import CommandParser, reports_errors, run_command


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.verify", description=__doc__)
    what = "runs/laptop, or runs/laptop/checkpoints/step-…"
    parser.option("checkpoint", Path, "CHECKPOINT", what)
    given = parser.parse_args(arguments).checkpoint
    checkpoints, damaged = checkpoints_of(given, "CHECKPOINT"), 0
    if checkpoints != [given]:
        checkpoints = sorted(named_checkpoints(checkpoints[0].parent))
    for path in checkpoints:
        try:
            manifest = verify_checkpoint(path)
            print(
                f"{path}: good, {len(manifest.tensors)} tensors in {len(manifest.files)} files, "
                f"{manifest.num_bytes:,} bytes"
            )
        except OSError as problem:
            damaged += 1
            print(f"{path}: cannot be read: {problem}")
        except Damaged as problem:
            if not exists(path):
                print(f"{path}: gone: its run has deleted it or put it aside meanwhile")
                continue
            damaged += 1
            print(f"{path}: damaged: {problem}")
    return int(damaged > 0)


if __name__ == "__main__":
    run_command(main)
