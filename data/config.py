"""The `data` section of a run's configuration."""

import os
from typing import Annotated, Any

from pydantic import ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from declare import PathOrNone, PathText, Share, between, section


def _each_once(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    folders = check(given)
    if len({*map(os.path.abspath, folders)}) < len(given):
        raise PydanticCustomError("twice", "It should name each folder once")
    return folders


@section("data")
class DataConfig:
    """The data that a run trains on."""

    # a folder written by `python -m tools.prepare`, or several with their mixture weights
    # ({folder: weight}), which are relative, and shares of samples (equivalently, tokens)
    path: PathText | Annotated[dict[PathText, Share], WrapValidator(_each_once)]
    # the tokenizer (file or folder) with which the data must have been prepared; empty: the one
    # inside the prepared folder
    tokenizer: PathOrNone = ""
    # tokens attend only within their own document, and positions restart at each document
    # (model/documents.py); without it, attention is causal over the whole sequence, which may
    # contain several unrelated documents
    document_mask: bool = False
    # number of batches that the loader's thread reads ahead
    prefetch: Annotated[int, between(1, 1000)] = 2

    def weights(self) -> dict[str, float]:
        """Each folder of `path`, with its weight."""
        return self.path if isinstance(self.path, dict) else {self.path: 1.0}
