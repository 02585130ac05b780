"""What a job will need: `python -m tools.plan CONFIG [--search]` prints what plan/ computes.

__main__.py  the command, and its tables
draw.py      its pictures
beside.py    a memory report beside the plan of its rank
"""
