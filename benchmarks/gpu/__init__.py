"""Benchmarks of one GPU: `make bench-gpu PART=right|fast|open`, in at most eight minutes a part.

run.py        runs a part: tests or programs, each in its own process; writes files and a page
page.py       the page: every estimate of estimates.yaml beside what was measured
plugin.py     makes pytest write a row for each benchmark and test, as soon as it is there
timing.py     a clock
kernels.py    fast: every kernel (operations.py, optimizer.py, head.py) beside PyTorch and Liger
model.py      fast: whole steps of the programs in programs.py, and a profile
attention.py  open: kernels of attention, alone and (model.py) in a step

What is right is tested, in tests/gpu/. Without a GPU, everything runs with tiny sizes in Triton's
CPU interpreter, which measures nothing.
"""
