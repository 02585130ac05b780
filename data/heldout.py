"""Which text is held out for evaluation, and never trained on.

A document is held out as a whole where its id's hash says so: a pure function of the id, so equal
ids are on one side whatever their order, their number and the files they come from.

That needs documents to choose from. One file is often one document, and all of it would be trained
on, or none. So where there are fewer than `FEW` documents, or the hash leaves one of the two splits
without any, every document is cut in two instead, and its end is held out: a pure function of its
text (`cut`). Each part is then a document of its own.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from data.sources import Document

FEW = 20  # with the usual fraction of 0.05, one held-out document is to be expected of as many
# That many are not few, even if a split has none of them. Until then they are kept in memory.
MOST_DOCUMENTS, MOST_CHARS = 1000, 1 << 26
CUT_WITHIN = 1000  # characters in which `cut` looks for the end of a line, or of a word


class Part(NamedTuple):
    """A document, or one of the two parts that one was cut into."""

    text: str
    held_out: bool


def held_out(document_id: str, fraction: float) -> bool:
    """Whether the document belongs to the held-out split: a pure function of its id, true for
    `fraction` of all ids."""
    digest = hashlib.blake2b(document_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def cut(text: str, fraction: float) -> int:
    """Where the held-out end of `text` begins: after (1 - fraction) of its characters, or at the
    start of the line (else the word) that is there, if that is near. Both parts have text, unless
    there is one character or none: that is trained on."""
    at = max(len(text) - max(round(len(text) * fraction), 1), 1)
    for separator in ("\n", " "):
        if found := text.rfind(separator, max(at - CUT_WITHIN, 0), at) + 1:
            return found
    return at


class Splitter:
    """Yields the parts of `documents`, in their order; of a cut one, the held-out part is second.

    cuts: whether documents are cut; False until the first part was yielded.
    """

    def __init__(self, documents: Iterable[Document], fraction: float) -> None:
        self._documents, self._fraction = iter(documents), fraction
        self.cuts = False

    def __iter__(self) -> Iterator[Part]:
        head: list[Part] = []
        characters = 0
        while self._fraction > 0 and not self._decided(head, characters):
            document = next(self._documents, None)
            if document is None:
                self.cuts = True
                break
            head.append(self._whole(document))
            characters += len(document.text)
        for part in head:
            if self.cuts:
                at = cut(part.text, self._fraction)
                yield Part(part.text[:at], held_out=False)
                if at < len(part.text):
                    yield Part(part.text[at:], held_out=True)
            else:
                yield part
        yield from map(self._whole, self._documents)

    def _whole(self, document: Document) -> Part:
        return Part(document.text, held_out(document.id, self._fraction))

    @staticmethod
    def _decided(head: list[Part], characters: int) -> bool:
        """Whether there are enough documents to hold out whole ones."""
        both = len({part.held_out for part in head}) == 2
        return (
            (both and len(head) >= FEW) or len(head) >= MOST_DOCUMENTS or characters >= MOST_CHARS
        )
