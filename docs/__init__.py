"""The guided tour and the manual: pages in Markdown, the code that draws the pictures that are
computed (pictures.py), recipes as patches, and exercises.

`make docs` draws the pictures and `make exercises` runs the exercises. tests/docs/test_docs.py runs
every command on every page, and compares its output with the page, except for numbers.
"""
