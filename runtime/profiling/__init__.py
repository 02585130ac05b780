"""Where the time of a step goes: what a run writes of it.

profile.py  runs some steps under torch's profiler; tools/profile.py reads what it writes
trace.py    records when each pipeline action of a step began and ended; tools/timeline/ reads it
"""
