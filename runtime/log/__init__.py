"""The run's log: what happened, how it ended, where its time went.

events.py      events.jsonl: what happened, and when
log_lines.py   how every reader gets the lines of events.jsonl and metrics.jsonl
status.py      status.json: how the last start ended
ledger.py      where a run's time went
"""
