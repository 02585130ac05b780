"""The `data` section of a run's configuration."""

from typing import Annotated

from declare import PathOrNone, PathText, Share, between, section


@section("data")
class DataConfig:
    """The data that a run trains on."""

    # a folder written by `python -m tools.prepare`, or several with their mixture weights
    # ({folder: weight}), which are relative, and shares of samples (equivalently, tokens)
    path: PathText | dict[PathText, Share]
    # the tokenizer (file or folder) with which the data must have been prepared; empty: the one
    # inside the prepared folder
    tokenizer: PathOrNone = ""
    # tokens attend only within their own document, and positions restart at each document
    # (model/documents.py); without it, attention is causal over the whole sequence, which may
    # contain several unrelated documents
    document_mask: bool = False
    # number of batches that the loader's thread reads ahead
    prefetch: Annotated[int, between(1, 1000)] = 2
