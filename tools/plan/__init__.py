"""What a job will need: `python -m tools.plan CONFIG [--search]`. The room plan/ computes, this
prints.

__main__.py  the command, and its tables
draw.py      its pictures
beside.py    a memory report beside the plan of its rank
"""
