"""The `data` section of a run's configuration."""

from typing import Annotated

from settings import PathText, Share, Text, between, section


@section("data")
class DataConfig:
    """What a run reads.

    path: a folder written by `python -m tools.prepare`, or several with their mixture weights
        ({folder: weight}; the weights are relative, and count samples, that is: tokens).
    tokenizer: a tokenizer's file or folder that the data must have been made with; empty: the one
        inside the prepared folder.
    document_mask: no token attends to another document's, and positions restart at each
        (model/documents.py). Without it attention is causal over the whole sequence, in which
        documents lie side by side as chance put them there.
    prefetch: batches read ahead by the loader's thread (>= 1).
    """

    path: PathText | dict[PathText, Share]
    tokenizer: Text = ""
    document_mask: bool = False
    prefetch: Annotated[int, between(1, 1000)] = 2
