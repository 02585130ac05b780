"""Checks that the nodes of a job are fit to train: `python -m tools.preflight` runs on each of them
before a start; see slurm/train_70b.sh.

__main__.py  the command: communication between the nodes, and the exit status
node.py      the report of one node: GPUs, disk, addresses, code, packages
verdict.py   compares the reports: finds deviating and slow nodes, and chooses the nodes to train on
links.py     measures the bandwidth within and between nodes
"""
