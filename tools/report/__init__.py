"""Reports on a run: `python -m tools.report RUN` prints its ledger; `--out FILE` writes a page.

__main__.py  the command          page.py    assembles the page; assets/: its style and script
run.py       reads a run folder   charts.py  curves, bars and the pipeline's timeline
experts.py   the load of experts  tables.py  ledger, events, configuration
ledger.py    what saves, restarts and steps took in a run, from its events.jsonl
goodput.py   effective time, the best interval between saves, the parts of starts
"""
