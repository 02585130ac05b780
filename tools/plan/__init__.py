"""Predicts the memory, traffic and time of a run before it starts: `python -m tools.plan CONFIG`.

The costs of the model's units are recorded from the code that trains them (costs/). This folder
combines them into the costs of a run.

__main__.py    the command, and its tables
summary.py     all figures of one job
check.py       what cannot be planned, and the assumptions of a plan
layout.py      what one rank of the world holds: units, and their weights as FSDP shards them
account.py     bytes by category, and their peak
sharded.py     what FSDP2 does around units: gathers, copies, reductions
whole.py       what is done instead for weights that no rank shares
memory.py      the memory of a rank's program, action by action
traffic.py     every collective of a step on one rank: axis, kind, count, bytes
hardware.py    a device by name, or from a file of rates
time.py        seconds of each action and of a step; MFU
narrow.py      matrix products that are too narrow for the device
exposure.py    seconds of communication, and how many of them are exposed
bounds.py      a lower bound on the bytes that a layout needs
estimate.py    a quick estimate of a step's seconds
candidates.py  all layouts, each with a bound on its memory and an estimate of its time
peaks.py       bytes that a layout's pipeline ranks need, counted in a shortened step
stages.py      the stage that is planned, of a run with stages of data
search.py      the fastest layouts that fit
goodput.py     effective training time, and spare nodes
node_counts.py the list `parallel.layouts`, for a range of node counts
guide.py       ZeRO's memory and traffic as guides count them
draw.py        pictures
beside.py      a memory report next to the plan of its rank
"""
