"""Whether pieces of a tensor tile it: every number in exactly one piece. A count does not tell:
pieces may overlap, and leave a gap of the same size.

Write a number's place (x, y, …) as the monomial sˣ·tʸ·…; a piece [a, b) × [c, d) × … is then the
sum of its monomials, which has a short form: (sᵇ − sᵃ) / (s − 1) · (tᵈ − tᶜ) / (t − 1) · …. The
pieces tile the shape exactly if the sum of their polynomials is that of the whole. Two polynomials
that differ have the same value at a random point with a probability of at most their degree over
the size of the field (Schwartz and Zippel), here less than 2⁻⁶⁰; and the point is drawn when a
checkpoint is checked, so whoever made it cannot know it.

So a rank needs no other's pieces, only their sum, one number for each tensor. Three million pieces
(405B on 16k ranks) take one process a minute, beside hours for the checksums of their bytes.
"""

import secrets
from collections.abc import Sequence

FIELD = (1 << 127) - 1  # a prime
MAX_DIMS = 8
MAX_NUMBERS = 1 << 63  # in a tensor, and so in each of its dimensions

Point = tuple[int, ...]  # a value for each dimension's variable


def random_point() -> Point:
    """The same for all pieces of a checkpoint, and another one for each check."""
    return tuple(2 + secrets.randbelow(FIELD - 2) for _ in range(MAX_DIMS))


def value_at(point: Point, offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """A piece's polynomial, times (s − 1)·(t − 1)·…, at `point`, in the field. A whole tensor is a
    piece with offsets of 0."""
    value = 1
    for variable, offset, size in zip(point, offsets, sizes, strict=False):  # a point has more
        value = value * (pow(variable, offset + size, FIELD) - pow(variable, offset, FIELD)) % FIELD
    return value
