"""Runs one rank of a job of any size on this machine: `python -m tools.rehearse CONFIG --rank R`.

__main__.py      the command
rank.py          runs one rank's step

fake_gpu.py      the fake GPU, and a fake world in which this process is the only real rank
device.py        its streams and events, and what is ordered before what
tape.py          sees every storage and operator, counts the collectives, and finds the peak of
                 memory. Its other kinds:
  operators.py   with --operators: every operator, what it moves, and the line that causes it
  races.py       with --races: what operators, collectives and the host's threads read and write

With --races also:
accesses.py      accesses that no wait orders; memory that is reused too early
overlap.py       what can hide each collective, and how long that takes on a device
findings.py      what was found, and on which line

Not seen: what happens inside an operator, other ranks (proofs/strict checks their order), and
compiled code.
"""
