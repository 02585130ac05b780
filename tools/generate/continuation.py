"""Streams tokens as text: outputs text as soon as it is certain, and no incomplete characters."""

from typing import Protocol

UNFINISHED = "\ufffd"  # the result of decoding bytes that are invalid or incomplete UTF-8


class Decoder(Protocol):
    def decode(self, ids: list[int]) -> str: ...


class Continuation:
    """The text that follows a prompt, token by token.

    A character may take several tokens, and is held back until its last byte has arrived. A token's
    text may also depend on the tokens before it: SentencePiece models that put a space before every
    text remove a leading space when they decode, so a word from the middle, decoded by itself,
    would lose its space. So a token's text is what it adds to the text of the tokens before it.
    Decoding all of them would cost more with every token; those whose text was output last suffice.

        add("▁the") → " the"     add(E2) → ""     add(82) → ""     add(AC) → "€"     end() → ""
    """

    def __init__(self, decoder: Decoder, prompt: list[int]) -> None:
        self._decoder = decoder
        self._given, self._waiting = list(prompt), list[int]()

    def add(self, token: int) -> str:
        """Adds a token, and returns the text that has thereby become certain; it may be empty."""
        self._waiting.append(token)
        return self._next(hold_back=True)

    def end(self) -> str:
        """Returns the text held back, with U+FFFD for bytes that did not become a character."""
        return self._next(hold_back=False)

    def _next(self, hold_back: bool) -> str:
        text = self._decoder.decode(self._given + self._waiting)
        if hold_back and text.endswith(UNFINISHED):
            return ""
        new = text[len(self._decoder.decode(self._given)) :]
        if new:  # bos and eos have no text, so the context before them is kept
            self._given, self._waiting = self._waiting, []
        return new
