"""Selects the text that is held out for evaluation and never trained on.

Usually whole documents are held out, chosen by the hash of their ids. The choice is a pure function
of the id: documents with equal ids are in the same split, whatever their order, their number and
the files they come from.

That needs enough documents to choose from: one file is often one document, which would be either
trained on or held out entirely. So if there are fewer than `FEW` documents, or if the hash leaves
one of the splits empty, every document is cut in two instead and its end is held out. The cut is a
pure function of the text (`cut`). Each part is then a separate document.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from data.sources import Document

FEW = 20  # with the default fraction of 0.05, this many give one held-out document on average
# From here on whole documents are held out, even if a split is still empty. Up to here they are
# kept in memory.
MOST_DOCUMENTS, MOST_CHARS = 1000, 1 << 26
CUT_WITHIN = 1000  # characters that `cut` searches for the end of a line, or of a word


class Part(NamedTuple):
    """A document, or one of the two parts into which a document was cut."""

    text: str
    held_out: bool


def held_out(document_id: str, fraction: float) -> bool:
    """Whether the document belongs to the held-out split: a pure function of its id, true for
    `fraction` of all ids."""
    digest = hashlib.blake2b(document_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def cut(text: str, fraction: float) -> int:
    """Returns the position where the held-out end of `text` begins: after (1 - fraction) of its
    characters, moved back to the start of that line (else that word) if it lies within CUT_WITHIN
    and at most twice as much is then held out. Neither part is empty, unless the text has at most
    one character: it is then trained on."""
    at = max(len(text) - max(round(len(text) * fraction), 1), 1)
    within = min(CUT_WITHIN, len(text) - at)
    for separator in ("\n", " "):
        if found := text.rfind(separator, max(at - within, 0), at) + 1:
            return found
    return at


class Splitter:
    """Yields the parts of `documents`, in order; the held-out part of a cut document comes second.

    cuts: whether documents are cut; False until the first part has been yielded.
    """

    def __init__(self, documents: Iterable[Document], fraction: float) -> None:
        self._documents, self._fraction = iter(documents), fraction
        self.cuts = False

    def __iter__(self) -> Iterator[Part]:
        head: list[Part] = []
        sides: set[bool] = set()
        characters = 0
        # until there are enough to decide that whole documents are held out
        while self._fraction > 0 and (len(sides) < 2 or len(head) < FEW):
            document = next(self._documents, None)
            if document is None:
                self.cuts = True
                break
            head.append(self._whole(document))
            sides.add(head[-1].held_out)
            characters += len(document.text)
            if len(head) >= MOST_DOCUMENTS or characters >= MOST_CHARS:
                break
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
