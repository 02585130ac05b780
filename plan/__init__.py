"""What a run will need and how long it will take, before it runs: pure functions of a configuration
and the size of its world.

check.py       what a plan cannot say anything about, and what it takes for granted
layout.py      the world, and what one rank of it holds: FSDP's units, tokens, widths of numbers
categories.py  what memory is for
account.py     bytes by category, and when they are most
sharded.py     what FSDP2 does around units: gathers, copies, reductions
memory.py      a rank's program, action by action, in bytes
traffic.py     every collective of a step on one rank: axis, kind, count, bytes, what the wire sees
hardware.py    rates of devices
links.py       seconds of a collective over each axis
time.py        seconds of each action, of a step, MFU
exposure.py    seconds of communication, and of those the ones waited for
bounds.py      bytes that a layout needs at least
candidates.py  all layouts, by estimate and bound
peaks.py       bytes that a layout's pipeline ranks need, counted in a shortened step
search.py      those that fit, by their time
summary.py     a job in numbers
guide.py       the accounting that guides use

Imports `training.config` and what it stands on; no tensor is made here. tools/plan prints it,
tools/rehearse measures it.
"""
