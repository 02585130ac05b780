"""Runs one rank of a job of any size on this machine: `python -m tools.rehearse CONFIG --rank R`.

__main__.py      the command
rank.py          runs one rank's step, on the fake GPU
real.py          runs it on a real device, with --real, and predicts the whole job's step

fake_gpu.py      the fake GPU, and a fake world in which this process is the only real rank
device.py        its streams and events, and what is ordered before what
tape.py          sees every storage and every operator, and counts the collectives. Its kinds:
  memory.py      the peak of memory, by category
  operators.py   with --operators: every operator, what it moves, and the line that causes it
  races.py       with --races: what operators and collectives read and write, on which stream

With --races also:
host.py          the host's threads
accesses.py      accesses that no wait orders; memory that is reused too early
overlap.py       what can hide each collective, and how long that takes on a device
findings.py      what was found, and on which line

Not seen: what happens inside an operator, other ranks (proofs/strict checks their order), and
compiled code.
"""
