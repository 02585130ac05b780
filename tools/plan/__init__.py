"""Predicts the memory, traffic and time of a run before it starts: `python -m tools.plan CONFIG`.

The costs of the model's units are recorded from the code that trains them (costs/). This folder
combines them into the costs of a run.

__main__.py    the command
summary.py     all figures of one job, and what is printed
hardware.py    a device by name, or from a file of rates
layout.py      what one rank of the world holds: units, and their weights as FSDP shards them
account.py     bytes by category, and their peak
memory.py      the bytes of a rank's program, action by action, and every rank's peak
whole_matrices.py  those of an optimizer's step with whole matrices
traffic.py     every collective of a step on one rank: axis, kind, count, bytes
time.py        seconds of each action and of a step, MFU, and how much communication is exposed
goodput.py     effective training time, and spare nodes
candidates.py  all layouts of a number of GPUs, with a lower bound on bytes, and estimated seconds
search.py      the fastest layouts that fit
guide.py       ZeRO's memory and traffic as guides count them
"""
