"""Check that pieces of a tensor tile it: that every number is in exactly one piece.

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
from collections.abc import Sequence

FIELD = (1 << 127) - 1  # a prime
MAX_DIMS = 8
MAX_NUMBERS = 1 << 63  # in a tensor, and so in each of its dimensions

Point = tuple[int, ...]  # a value for each dimension's variable


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
