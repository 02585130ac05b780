"""The run's log: what happened, how it ended, where its time went.

run_log.py     RunLog: writes all of it, on rank 0, and tells the monitor
events.py      events.jsonl: what happened, and when
log_lines.py   how every reader gets the lines of events.jsonl and metrics.jsonl
status.py      how a start ended: its one event `end`, and status.json
ledger.py      where a run's time went
"""
