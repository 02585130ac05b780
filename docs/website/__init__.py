"""The static site that `make site` builds from the pages, the docstrings and the source."""
