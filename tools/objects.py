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

import shutil
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from errors import UserError
from runtime.checkpoint.folder import MANIFEST, NAME, sync
from runtime.checkpoint.manifest import Damaged, fingerprint, read_manifest
from runtime.checkpoint.verify import check_files, described, verify_checkpoint
from runtime.output import log
from tools.command import CommandParser, reports_errors, run_command

PARTIAL = f"{MANIFEST}.partial"
FETCHING = ".fetching"  # suffix of a folder that is being fetched
AT_ONCE = 16  # files that are checked and then sent: what is sent is not read again


def open_store(url: str) -> DirFileSystem:
    """A folder of an object store: a file system whose paths are relative to it."""
    try:
        store, root = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:  # its package is missing, or no such protocol
        remedy = "install the package that it names, or give s3://BUCKET/…, gs://…, or a path"
        raise UserError("URL", url, str(error), remedy) from None
    return DirFileSystem(root, store)


def sizes(store: DirFileSystem, folder: str) -> dict[str, int]:
    """Return the size in bytes of each object in a folder by name."""
    try:
        found = store.ls(folder, detail=True)
    except FileNotFoundError:
        return {}
    return {Path(each["name"]).name: each["size"] for each in found if each["type"] == "file"}


def complete(store: DirFileSystem) -> list[str]:
    """Return the names of the complete checkpoints, oldest first."""
    try:
        found = store.ls("", detail=False)  # unlike glob, this raises if it cannot be listed
    except FileNotFoundError:
        return []
    names = sorted(filter(NAME.fullmatch, (Path(each).name for each in found)))
    # unlike exists, this raises if the store does not answer: an older one is then not the newest
    return [name for name in names if read(store, f"{name}/{MANIFEST}") is not None]


def read(store: DirFileSystem, path: str) -> bytes | None:
    """Return the content of an object; None if there is none."""
    try:
        return bytes(store.cat_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def push(store: DirFileSystem, checkpoint: Path) -> str:
    """Copy a checkpoint to the store; return what was done. Raises Damaged if it is damaged here,
    or if the store does not hold what was written."""
    (manifest, point), name = described(checkpoint), checkpoint.absolute().name
    if not NAME.fullmatch(name):  # "" would be the store itself, which is then cleared
        why = "its name is not that of a checkpoint, by which it would be found again"
        raise UserError("FOLDER", str(checkpoint), why, "give a folder step-…")
    content = (checkpoint / MANIFEST).read_bytes()
    wanted = {file: size for file, (size, _) in manifest.files.items()}
    there = sizes(store, name)
    if read(store, f"{name}/{MANIFEST}") == content and wanted.items() <= there.items():
        return "was there already"
    # What is there belongs to this checkpoint only if PARTIAL says so: the run may have gone back
    # and saved this step again, with files of the same sizes.
    if MANIFEST in there or read(store, f"{name}/{PARTIAL}") != content:
        first = there.keys() & {MANIFEST}  # without it, the old one is incomplete
        for names in filter(None, (first, there.keys() - first)):
            store.rm([f"{name}/{file}" for file in sorted(names)])
        there = {}
        store.makedirs(name, exist_ok=True)  # no request to a bucket
        store.pipe_file(f"{name}/{PARTIAL}", content)
    missing = [file for file, size in wanted.items() if there.get(file) != size]
    for first in range(0, len(missing), AT_ONCE):
        some = missing[first : first + AT_ONCE]
        check_files(checkpoint, manifest, some, point, shown=False)
        store.put([str(checkpoint / file) for file in some], [f"{name}/{file}" for file in some])
    if not wanted.items() <= sizes(store, name).items():
        raise Damaged(f"{name} in the store does not hold all files that were written")
    store.pipe_file(f"{name}/{MANIFEST}", content)
    if read(store, f"{name}/{MANIFEST}") != content:
        raise Damaged(f"{name}/{MANIFEST} in the store is not as it was written")
    store.rm([f"{name}/{PARTIAL}"])
    return f"{len(missing)} files, {sum(wanted[file] for file in missing) / 1e6:,.1f} MB"


def fetch(store: DirFileSystem, name: str, folder: Path) -> str:
    """Copy a checkpoint from the store into `folder`, verified; return what was done. Raises
    Damaged if the store's copy is incomplete or damaged; then nothing has its final name."""
    content, final = read(store, f"{name}/{MANIFEST}"), folder / name
    if content is None:
        raise Damaged(f"{name} in the store has no {MANIFEST}: it is incomplete")
    if final.exists():
        why = "is another checkpoint than the store's"
        if (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == content:
            try:
                verify_checkpoint(final)
                return "was there already"
            except Damaged as problem:
                why = f"is damaged: {problem}"
        raise UserError("FOLDER", str(final), why, "move it away")
    partial = folder / f"{name}{FETCHING}"
    if (partial / MANIFEST).is_file() and (partial / MANIFEST).read_bytes() != content:
        shutil.rmtree(partial)  # begun before the run saved this step again
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
        store.get([f"{name}/{file}" for file in missing], here)
    except FileNotFoundError as error:
        raise Damaged(f"{name} in the store is incomplete: {error}") from None
    verify_checkpoint(partial)
    for file in [*manifest.files, MANIFEST, ""]:  # "": the folder
        sync(partial / file)
    partial.rename(final)
    return f"{len(missing)} files, {manifest.num_bytes / 1e6:,.1f} MB, every sha256 is right"


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.objects", description=__doc__)
    what = "what to do, as above"
    parser.option("command", str, None, what, choices=("push", "fetch", "list"))
    parser.option("url", str, "URL", "a folder of checkpoints, or the checkpoint to fetch")
    where = "what to push (checkpoint.after_commit adds its manifest.json), or where to fetch it"
    parser.option("folder", Path, "FOLDER", where, nargs="*")
    options = parser.parse_args(arguments)
    folder = options.folder[0] if options.folder else Path()
    if len(options.folder) not in {"push": (1, 2), "fetch": (1,), "list": (0,)}[options.command]:
        parser.error(f"{options.command} takes {'no' if options.command == 'list' else 'a'} folder")
    url, _, last = options.url.rstrip("/").rpartition("/")
    named = NAME.fullmatch(last)
    try:
        url = url if named else options.url.rstrip("/")
        store = open_store(url)
        if options.command == "push":
            print(f"{url}/{folder.absolute().name}: {push(store, folder)}")
        elif options.command == "list":
            print(*complete(store), sep="\n")
        elif names := [last] if named else complete(store):
            print(f"{folder / names[-1]}: {fetch(store, names[-1], folder)}")
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
