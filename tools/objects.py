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

from errors import UserError
from output import log
from runtime.checkpoints.manifest import Damaged, check_sizes, fingerprint, read_manifest, verify
from runtime.checkpoints.names import MANIFEST, NAME
from tools.command import CommandParser, reports_errors, run_command

PARTIAL = f"{MANIFEST}.partial"
FETCHING = ".fetching"  # suffix of a folder that is being fetched


class Store:
    """A folder of an object store; paths are relative to it."""

    def __init__(self, url: str) -> None:
        import fsspec  # only here: a tool that needs no store must not need the package
        from fsspec.implementations.dirfs import DirFileSystem

        try:
            files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # its package is missing, or no such protocol
            remedy = "install the package that it names, or give s3://BUCKET/…, gs://…, or a path"
            raise UserError("URL", url, str(error), remedy) from None
        self.url, self.files = url.rstrip("/"), DirFileSystem(root, files)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each object in a folder, by name."""
        try:
            found = self.files.ls(folder, detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rstrip("/").rsplit("/", 1)[-1]: each["size"] for each in found}

    def read(self, path: str) -> bytes | None:
        """Return the content of an object; None if there is none."""
        try:
            return bytes(self.files.cat_file(path))
        except FileNotFoundError:
            return None

    def write(self, folder: str, name: str, content: bytes) -> None:
        self.files.makedirs(folder, exist_ok=True)  # no request to a bucket
        self.files.pipe_file(f"{folder}/{name}", content)

    def remove(self, paths: list[str]) -> None:
        if paths:
            self.files.rm(paths)

    def put(self, local: Path, names: list[str]) -> None:
        """Write files of a local folder, several at a time."""
        there = [f"{local.name}/{name}" for name in names]
        self.files.put([str(local / name) for name in names], there)

    def complete(self) -> list[str]:
        """Return the names of the complete checkpoints, oldest first."""
        names = filter(NAME.fullmatch, sorted(self.sizes("")))
        return [name for name in names if self.files.exists(f"{name}/{MANIFEST}")]


def push(store: Store, checkpoint: Path) -> str:
    """Copy a checkpoint to the store; return what was done. Raises Damaged if it is damaged here,
    or if the store does not hold what was written."""
    manifest, name = read_manifest(checkpoint), checkpoint.name
    check_sizes(checkpoint, manifest)
    content = (checkpoint / MANIFEST).read_bytes()
    wanted = {file: size for file, (size, _) in manifest.files.items()}
    there = store.sizes(name)
    if store.read(f"{name}/{MANIFEST}") == content and wanted.items() <= there.items():
        return "was there already"
    # What is there belongs to this checkpoint only if PARTIAL says so: the run may have gone back
    # and saved this step again, with files of the same sizes.
    if MANIFEST in there or store.read(f"{name}/{PARTIAL}") != content:
        first = there.keys() & {MANIFEST}  # without it, the old one is incomplete
        for names in (first, there.keys() - first):
            store.remove([f"{name}/{file}" for file in sorted(names)])
        there = {}
        store.write(name, PARTIAL, content)
    missing = [file for file, size in wanted.items() if there.get(file) != size]
    store.put(checkpoint, missing)
    if not wanted.items() <= store.sizes(name).items():
        raise Damaged(f"{store.url}/{name} does not hold all files that were written")
    store.write(name, MANIFEST, content)
    if store.read(f"{name}/{MANIFEST}") != content:
        raise Damaged(f"{store.url}/{name}/{MANIFEST} is not as it was written")
    store.remove([f"{name}/{PARTIAL}"])
    return f"{len(missing)} files, {sum(wanted[file] for file in missing) / 1e6:,.1f} MB"


def fetch(store: Store, name: str, folder: Path) -> str:
    """Copy a checkpoint from the store into `folder`, verified; return what was done. Raises
    Damaged if the store's copy is incomplete or damaged; then nothing has its final name."""
    content, final = store.read(f"{name}/{MANIFEST}"), folder / name
    if content is None:
        raise Damaged(f"{store.url}/{name} has no {MANIFEST}: it is incomplete")
    if (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == content:
        return "was there already"
    if final.exists():
        why, remedy = "is another checkpoint than the store's", "move it away"
        raise UserError("FOLDER", str(final), why, remedy)
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
        here = [str(partial / file) for file in missing]
        store.files.get([f"{name}/{file}" for file in missing], here)
    except FileNotFoundError as error:
        raise Damaged(f"{store.url}/{name} is incomplete: {error}") from None
    verify(partial)
    for file in [*manifest.files, MANIFEST, ""]:  # "": the folder
        handle = os.open(partial / file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    partial.rename(final)
    return f"{len(missing)} files, {manifest.num_bytes / 1e6:,.1f} MB, every sha256 is right"


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.objects", description=__doc__)
    what = "what to do, as above"
    parser.option("command", str, None, what, choices=("push", "fetch", "list"))
    parser.option("url", str, "URL", "a folder of checkpoints, or the checkpoint to fetch")
    parser.option("path", Path, "FOLDER", "what to push, or where to fetch it", nargs="?")
    again = "its manifest.json, which checkpoint.after_commit adds"
    parser.option("manifest", Path, "MANIFEST", again, nargs="?")
    options = parser.parse_args(arguments)
    if options.path is None and options.command != "list":
        parser.error(f"{options.command} needs a folder after the URL")
    url, _, last = options.url.rstrip("/").rpartition("/")
    named = NAME.fullmatch(last)
    try:
        store = Store(url if named else options.url)
        if options.command == "push":
            print(f"{store.url}/{options.path.name}: {push(store, options.path)}")
        elif options.command == "list":
            print(*store.complete(), sep="\n")
        elif complete := [last] if named else store.complete():
            print(f"{options.path / complete[-1]}: {fetch(store, complete[-1], options.path)}")
        else:
            why = "holds no complete checkpoint"
            raise UserError("URL", options.url, why, "see `python -m tools.objects list URL`")
    except UserError:
        raise
    except Exception as error:  # Damaged, or the store's: no network, no such bucket, no permission
        log(f"error: {options.url}: {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    run_command(main)
