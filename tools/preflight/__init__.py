"""Checks that the nodes of a job are fit to train: `python -m tools.preflight` runs on each of them
before a start; see slurm/train_70b.sh.

__main__.py  the command: communication between the nodes, which of them train, and the exit status
node.py      the report of one node: GPUs, disk, addresses, code, packages
links.py     measures the bandwidth within and between nodes
"""
