"""Verify a checkpoint: that it is what was saved, and that a run can go on from it.

Every file's sha256 is compared, so what a manifest describes is what its save has checked. That the
pieces in the files tile their tensors, so that every number is in exactly one piece, is checked
there, and again by tools.verify and by the ranks of a start, for manifests that no save has
written: it takes only the files' headers.

Counting numbers is not enough, since an overlap can hide a gap of the same size. Instead, represent
the position (x, y, …) of a number by the monomial sˣ·tʸ·…. A piece [a, b) × [c, d) × … is then the
sum of its monomials, in closed form (sᵇ − sᵃ) / (s − 1) · (tᵈ − tᶜ) / (t − 1) · …. The pieces tile
the shape if and only if the sum of their polynomials equals that of the whole. Two different
polynomials agree at a random point with a probability of at most their degree over the size of the
field (Schwartz–Zippel lemma), here less than 2⁻⁶⁰. The point is drawn when a checkpoint is checked,
so that a forged checkpoint cannot be built for it.

So ranks exchange only sums, one number for each tensor, and no pieces. Three million pieces (405B
on 16k ranks) take one process a minute, compared with hours for the checksums of their bytes.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from errors import raise_passing
from runtime.checkpoint.folder import NAME, step_of
from runtime.checkpoint.manifest import (
    MAX_DIMS,
    TENSORS,
    Damaged,
    Manifest,
    check_sizes,
    fingerprint,
    read_manifest,
)
from runtime.checkpoint.progress import byte_bar
from runtime.checkpoint.tensor_files import read_pieces
from runtime.schema import first_problem, load_json
from runtime.trainer_state import FILE, TrainerState

FIELD = (1 << 127) - 1  # a prime
Point = tuple[int, ...]  # a value for each dimension's variable


def verify_checkpoint(path: Path) -> Manifest:
    """Run every check that a start makes before it uses a checkpoint, in one process. Raises
    Damaged."""
    manifest, point = described(path)
    check_whole(manifest, check_files(path, manifest, [*manifest.files], point), point)
    return manifest


def described(path: Path) -> tuple[Manifest, Point]:
    """Read what describes a checkpoint, before its files are read whole; return its manifest, and a
    new point at which to compare its pieces. Raises Damaged."""
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    parse_trainer(path)
    return manifest, random_point()


def check_files(
    path: Path, manifest: Manifest, names: Sequence[str], point: Point, shown: bool = True
) -> Counter[str]:
    """Read these files, and return what they `cover`. Raises Damaged if one differs from what was
    saved. `shown`: whether this process has the progress bar."""
    covered = Counter[str]()
    size = sum(manifest.files[name].bytes for name in names)
    with byte_bar(f"checking {path.name}", size, shown) as bar:
        for name in names:
            try:
                found = fingerprint(path / name)
            except OSError as error:
                raise_passing(error)
                raise Damaged(f"its file {name!r} cannot be read ({error.strerror})") from None
            bar.update(found.bytes)
            if found != manifest.files[name]:
                raise Damaged(f"its file {name!r} was changed (its sha256 differs)")
            if name.endswith(TENSORS):
                covered += cover(path / name, manifest, point)
    return covered


def cover(file: Path, manifest: Manifest, point: Point) -> Counter[str]:
    """Map each tensor to the sum of the polynomials at `point` of its pieces in a safetensors file.
    The results of several files are added. Raises Damaged like `read_pieces`."""
    covered = Counter[str]()
    for piece in read_pieces(file, manifest):
        covered[piece.name] += value_at(point, piece.offsets, piece.sizes)
    return covered


def check_whole(manifest: Manifest, covered: Counter[str], point: Point) -> None:
    """Raise Damaged unless what is `covered` at `point` is every tensor, once."""
    for name, (_, shape) in manifest.tensors.items():
        if (covered[name] - value_at(point, [0] * len(shape), shape)) % FIELD:
            raise Damaged(
                f"the pieces of {name!r} in its files do not make up its shape {shape}: "
                "some overlap or are missing"
            )


def random_point() -> Point:
    """Draw a point: one for all pieces of a checkpoint, and a new one for each check."""
    return tuple(2 + secrets.randbelow(FIELD - 2) for _ in range(MAX_DIMS))


def value_at(point: Point, offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """Evaluate a piece's polynomial, times (s − 1)·(t − 1)·…, at `point`, in the field. A whole
    tensor is a piece with offsets of 0."""
    value = 1
    # not strict: a point has MAX_DIMS coordinates
    for variable, offset, size in zip(point, offsets, sizes, strict=False):
        value = value * (pow(variable, offset + size, FIELD) - pow(variable, offset, FIELD)) % FIELD
    return value


def parse_trainer(path: Path) -> TrainerState:
    """Read and validate a checkpoint's trainer.json. Raises Damaged."""
    try:
        text = (path / FILE).read_text(encoding="utf-8")
        load_json(text)
    except (OSError, ValueError, RecursionError) as error:
        raise_passing(error)
        raise Damaged(f"its {FILE} is missing or unreadable") from None
    try:
        trainer = TrainerState.model_validate_json(text)
    except ValidationError as error:
        raise Damaged(f"its {FILE} has invalid content ({first_problem(error)})") from None
    if NAME.fullmatch(path.name) and step_of(path) != trainer.step:
        where = f"its folder name says {step_of(path)}"
        raise Damaged(f"its {FILE} says it was saved after {trainer.step} steps, but {where}")
    return trainer
