"""How much of a run's time is effective, how often to save, how many spare nodes: `python -m
tools.goodput`

__main__.py    the command, and its tables
simulate.py    a run with failures, saves, repairs and spare nodes, event by event

What saves, restarts and steps took in a run is measured in tools/report/ledger.py. The closed forms
are in runtime/checkpoints/goodput.py, where a run chooses its interval.
"""
