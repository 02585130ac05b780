"""Tokens to text while they come: what can be shown already, and no broken characters."""

from typing import Protocol

UNFINISHED = "\ufffd"  # what bytes decode to that are no UTF-8, or not yet


class Decoder(Protocol):
    def decode(self, ids: list[int]) -> str: ...


class Continuation:
    """The text that follows a prompt, token by token.

    A character may take several tokens, and is held back until its last byte is there. And a
    token's text may depend on the ones before it: SentencePiece models that begin each text with a
    space drop it at the beginning, and a word in the middle, decoded alone, would lose its own. So
    a token's text is what it adds to that of the tokens before it. Not of all of them, which would
    cost more with every token: those given last are enough.

        add("▁the") → " the"     add(E2) → ""     add(82) → ""     add(AC) → "€"     end() → ""
    """

    def __init__(self, decoder: Decoder, prompt: list[int]) -> None:
        self._decoder = decoder
        self._given, self._waiting = list(prompt), list[int]()

    def add(self, token: int) -> str:
        """The text that is certain with this token and was not before it."""
        self._waiting.append(token)
        return self._next(hold_back=True)

    def end(self) -> str:
        """What was held back, with U+FFFD for bytes that no character came of."""
        return self._next(hold_back=False)

    def _next(self, hold_back: bool) -> str:
        text = self._decoder.decode(self._given + self._waiting)
        if hold_back and text.endswith(UNFINISHED):
            return ""
        new = text[len(self._decoder.decode(self._given)) :]
        if new:  # bos and eos have no text: what follows them continues what was before
            self._given, self._waiting = self._waiting, []
        return new
