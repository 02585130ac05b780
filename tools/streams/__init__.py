"""Streams, memory, threads and overlap of a step, checked without a GPU: `python -m tools.streams`.

__main__.py    the command
step.py        runs the real step of one rank on the pretended device
watch.py       issues every operator on the current stream
device.py      streams, events, and one current device per thread
nccl.py        collectives and messages, on the streams that NCCL's group uses
threads.py     threads of the host, and autograd's
clocks.py      vector clocks: what is ordered before what
memory.py      accesses without order; memory that is reused too early
overlap.py     what can hide each collective
seconds.py     how long that takes on a device
findings.py    what was found, and on which line

The step is also run by tools/rehearse, on a device without streams, to measure memory. Not seen
here: what happens inside an operator, other ranks (proofs/strict checks their order), and compiled
code.
"""
