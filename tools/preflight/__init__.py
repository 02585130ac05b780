"""Are the nodes of a job fit to train? `python -m tools.preflight` runs on each of them before a
start; see slurm/train_70b.sh.

__main__.py  the command: all nodes meet, the exit status
node.py      what one node says of itself: GPUs, clocks, disk, versions
verdict.py   reports side by side: who differs, who is slow, who is to train
links.py     how fast nodes talk to each other
"""
