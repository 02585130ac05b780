"""What a run will need and how long it will take, before it runs: `python -m tools.plan CONFIG`.

Units of the model are recorded from the code that trains them (costs/); here they are put together.

__main__.py    the command, and its tables
summary.py     a job in numbers
check.py       what a plan cannot say anything about, and what it takes for granted
layout.py      the world, and what one rank of it holds: units, their weights as FSDP cuts them
account.py     bytes by category, and when they are most
sharded.py     what FSDP2 does around units: gathers, copies, reductions
memory.py      a rank's program, action by action, in bytes
traffic.py     every collective of a step on one rank: axis, kind, count, bytes
hardware.py    a device by name, or from a file of rates
time.py        seconds of each action, of a step, MFU
exposure.py    seconds of communication, and of those the ones waited for
bounds.py      bytes that a layout needs at least
candidates.py  all layouts, by estimate and bound
peaks.py       bytes that a layout's pipeline ranks need, counted in a shortened step
search.py      those that fit, by their time
guide.py       the accounting that guides use
draw.py        pictures
beside.py      a memory report beside the plan of its rank
"""
