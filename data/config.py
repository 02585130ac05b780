"""The `data` section of a run's configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """What a run reads.

    path: a folder written by `python -m tools.prepare`, or several with their mixture weights ({folder: weight}; the
        weights are relative, and count samples, that is: tokens).
    tokenizer: a SentencePiece model that the data must have been made with; empty: the one inside the prepared folder.
    prefetch: batches read ahead by the loader's thread (>= 1).
    """

    path: str | dict[str, float]
    tokenizer: str = ""
    prefetch: int = 2
