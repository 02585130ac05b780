"""Runs one rank of a job of any size on this machine: `python -m tools.rehearse CONFIG --rank R`.

__main__.py    the command
rank.py        runs one rank's step, on a fake GPU or a real device
fake_gpu.py    a fake GPU, and a fake world in which this process is the only real rank
tape.py        records memory by category, and every collective
operators.py   records every operator, with --operators
prediction.py  predicts the whole job's step, with --real --stages
"""
