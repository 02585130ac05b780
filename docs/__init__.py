"""The guided tour: pages in Markdown, the code that draws their pictures (draw_*.py, with svg.py),
and exercises.

`make docs` draws, `make exercises` asks, tests/test_docs.py runs every command of every page and
holds what it prints against what the page shows.
"""
