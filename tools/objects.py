"""Copies checkpoints to an object store and back, so that an incomplete one is never taken for
complete.

    python -m tools.objects push URL CHECKPOINT   (for checkpoint.after_commit="… push URL")
    python -m tools.objects fetch URL FOLDER      (FOLDER: RUN/checkpoints, before a start)
    python -m tools.objects list URL

URL is a folder of checkpoints in anything that fsspec knows: s3://BUCKET/RUN, gs://…, az://…,
/mnt/archive/RUN. Each needs its own package (s3fs for s3://), and finds its credentials and its
endpoint as always. fetch takes the newest complete checkpoint, or the one that URL names
(…/step-00000100).

push writes three times: manifest.json.partial, which names the checkpoint that is on its way; every
file; and last manifest.json. If it is interrupted, the next push of the same checkpoint continues.
fetch reads into a folder whose name counts as no checkpoint, compares every file with its sha256 in
the manifest, and renames the folder at the end; it continues an interrupted fetch, too.
"""

import os
from pathlib import Path
from typing import Any

from errors import UserError
from output import log
from runtime.checkpoints.manifest import Damaged, check_sizes, fingerprint, read_manifest, verify
from runtime.checkpoints.names import MANIFEST, NAME
from tools.command import CommandParser, reports_errors, run_command

PARTIAL = f"{MANIFEST}.partial"
FETCHING = ".fetching"  # suffix of a folder that is being fetched


class Store:
    """A folder of an object store."""

    def __init__(self, url: str) -> None:
        import fsspec  # only here: a tool that needs no store must not need the package

        try:
            self.files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # its package is missing, or no such protocol
            remedy = "install the package that it names, or give s3://BUCKET/…, gs://…, or a path"
            raise UserError("URL", url, str(error), remedy) from None
        self.url, self.root = url.rstrip("/"), root.rstrip("/")
        self.files.use_listings_cache = False

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each object in a folder, by name."""
        self.files.invalidate_cache()
        try:
            found = self.files.ls(f"{self.root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rsplit("/", 1)[-1]: each["size"] for each in found
                if each["type"] == "file"}  # fmt: skip

    def read(self, folder: str, name: str) -> bytes | None:
        """Return the content of an object; None if there is none."""
        try:
            return bytes(self.files.cat_file(f"{self.root}/{folder}/{name}"))
        except FileNotFoundError:
            return None

    def write(self, folder: str, name: str, content: bytes) -> None:
        self.files.makedirs(f"{self.root}/{folder}", exist_ok=True)  # no request to a bucket
        self.files.pipe_file(f"{self.root}/{folder}/{name}", content)

    def remove(self, folder: str, names: list[str]) -> None:
        if names:
            self.files.rm([f"{self.root}/{folder}/{name}" for name in names])

    def put(self, local: Path, folder: str, names: list[str]) -> None:
        """Write local files, several at a time."""
        there = [f"{self.root}/{folder}/{name}" for name in names]
        self.files.put([str(local / name) for name in names], there)

    def get(self, folder: str, names: list[str], local: Path) -> None:
        there = [f"{self.root}/{folder}/{name}" for name in names]
        self.files.get(there, [str(local / name) for name in names])

    def complete(self) -> list[str]:
        """Return the names of the complete checkpoints, oldest first."""
        self.files.invalidate_cache()
        try:
            found = self.files.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in found}
        return [name for name in sorted(names) if NAME.fullmatch(name)
                and self.files.exists(f"{self.root}/{name}/{MANIFEST}")]  # fmt: skip


def push(store: Store, checkpoint: Path) -> str:
    """Copy a checkpoint to the store; return what was done. Raises Damaged if it is damaged here,
    or if the store does not hold what was written."""
    manifest, name = read_manifest(checkpoint), checkpoint.name
    check_sizes(checkpoint, manifest)
    content = (checkpoint / MANIFEST).read_bytes()
    wanted = {file: size for file, (size, _) in manifest.files.items()}
    there = store.sizes(name)
    if store.read(name, MANIFEST) == content and wanted.items() <= there.items():
        return "was there already"
    # What is there belongs to this checkpoint only if PARTIAL says so: the run may have gone back
    # and saved this step again, with files of the same sizes.
    if MANIFEST in there or store.read(name, PARTIAL) != content:
        store.remove(name, sorted(there.keys() & {MANIFEST}))  # first: now it is incomplete
        store.remove(name, sorted(there.keys() - {MANIFEST}))
        there = {}
        store.write(name, PARTIAL, content)
    missing = [file for file, size in wanted.items() if there.get(file) != size]
    store.put(checkpoint, name, missing)
    if not wanted.items() <= store.sizes(name).items():
        raise Damaged(f"{store.url}/{name} does not hold all files that were written")
    store.write(name, MANIFEST, content)
    if store.read(name, MANIFEST) != content:
        raise Damaged(f"{store.url}/{name}/{MANIFEST} is not as it was written")
    store.remove(name, [PARTIAL])
    return f"{len(missing)} files, {sum(wanted[file] for file in missing) / 1e6:,.1f} MB"


def fetch(store: Store, name: str, folder: Path) -> str:
    """Copy a checkpoint from the store into `folder`, verified; return what was done. Raises
    Damaged if the store's copy is incomplete or damaged; then nothing has its final name."""
    content, final = store.read(name, MANIFEST), folder / name
    if content is None:
        raise Damaged(f"{store.url}/{name} has no {MANIFEST}: it is incomplete")
    if final.exists():
        if not (final / MANIFEST).is_file() or (final / MANIFEST).read_bytes() != content:
            why, remedy = "is another checkpoint than the store's", "move it away"
            raise UserError("FOLDER", str(final), why, remedy)
        return "was there already"
    partial = folder / f"{name}{FETCHING}"
    partial.mkdir(parents=True, exist_ok=True)
    (partial / MANIFEST).write_bytes(content)
    manifest = read_manifest(partial)  # also: no name in it is a path
    missing = [
        file
        for file, known in manifest.files.items()
        if not (partial / file).is_file() or fingerprint(partial / file) != known
    ]
    try:
        store.get(name, missing, partial)
    except FileNotFoundError as error:
        raise Damaged(f"{store.url}/{name} is incomplete: {error}") from None
    verify(partial)
    for file in [*manifest.files, MANIFEST, ""]:  # "": the folder
        handle = os.open(partial / file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    os.rename(partial, final)
    return f"{len(missing)} files, {manifest.num_bytes / 1e6:,.1f} MB, every sha256 is right"


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.objects", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, argument in (("push", "CHECKPOINT"), ("fetch", "FOLDER"), ("list", "")):
        command = commands.add_parser(name)
        command.add_argument("url", metavar="URL")
        if argument:
            command.add_argument("path", type=Path, metavar=argument)
        if name == "push":  # checkpoint.after_commit adds it; it is CHECKPOINT/manifest.json
            command.add_argument("manifest", nargs="?", metavar="MANIFEST")
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except UserError:
        raise
    except Damaged as error:
        log(f"error: {error}")
    except Exception as error:  # of the store: no network, no such bucket, no permission
        log(f"error: {options.url}: {type(error).__name__}: {error}")
    return 1


def run(options: Any) -> int:
    url, _, last = options.url.rstrip("/").rpartition("/")
    named = NAME.fullmatch(last)
    store = Store(url if named else options.url)
    if options.command == "list":
        print(*store.complete(), sep="\n")
    elif options.command == "push":
        print(f"{store.url}/{options.path.name}: {push(store, options.path)}")
    else:
        complete = [last] if named else store.complete()
        if not complete:
            why = "holds no complete checkpoint"
            raise UserError("URL", options.url, why, "see `python -m tools.objects list URL`")
        print(f"{options.path / complete[-1]}: {fetch(store, complete[-1], options.path)}")
    return 0


if __name__ == "__main__":
    run_command(main)
