"""The `data` section of a run's configuration."""

from typing import Annotated

from declare import PathOrNone, PathText, Share, between, section


@section("data")
class DataConfig:
    """The data that a run trains on.

    path: a folder written by `python -m tools.prepare`, or several with their mixture weights
        ({folder: weight}). Weights are relative, and are shares of samples (equivalently, tokens).
    tokenizer: the tokenizer (file or folder) with which the data must have been prepared; empty:
        the one inside the prepared folder.
    document_mask: tokens attend only within their own document, and positions restart at each
        document (model/documents.py). Without it, attention is causal over the whole sequence,
        which may contain several unrelated documents.
    prefetch: number of batches that the loader's thread reads ahead (>= 1).
    """

    path: PathText | dict[PathText, Share]
    tokenizer: PathOrNone = ""
    document_mask: bool = False
    prefetch: Annotated[int, between(1, 1000)] = 2
