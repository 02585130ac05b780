"""What became of a run: `python -m tools.report RUN` prints its ledger; `--out FILE`: an HTML page.

__main__.py  the command          page.py    the page, put together; assets/: its style and script
run.py       what a folder says   charts.py  curves, bars and the pipeline's timeline
                                  tables.py  ledger, events, configuration
"""
