"""Reports on a run: `python -m tools.report RUN` prints its ledger; `--out FILE` writes a page, and
`--png FILE` its loss as a picture.

__main__.py  the command            page.py, page.html  the page, which escapes what a run wrote
run.py       reads a run folder     charts.py           the curves
"""
