"""What a run will need and how long it will take, before it runs: pure functions of a configuration and the size of its world.

layout.py    the world, and what one rank of it holds: parameters by FSDP's units, tokens, widths of numbers
memory.py    bytes by category on one rank, action by action, and when they are most
traffic.py   every collective of a step on one rank: axis, kind, count, bytes; and what of it crosses the wire
hardware.py  rates of devices
time.py      seconds of each action, of a step, MFU, energy and cost
search.py    all layouts that fit, by their time

Imports `training.config` and what it stands on; no tensor is made here. tools/plan.py prints it, tools/rehearse.py measures it.
"""
