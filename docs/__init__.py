"""The guided tour: pages in Markdown, the code that draws their pictures (draw_*.py, with svg.py),
and exercises.

`make docs` draws the pictures and `make exercises` runs the exercises. tests/docs/test_docs.py runs
every command on every page, and compares its output with the page, except for numbers.
"""
