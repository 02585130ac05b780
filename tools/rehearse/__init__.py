"""Any rank of any job, carried out here: `python -m tools.rehearse CONFIG --rank R`.

__main__.py    the command
rank.py        one rank's step, on a fake GPU or a real one
fake_gpu.py    the GPU that is not there, and the world of which one process is the only rank
tape.py        what is written down: memory by what it is for, every collective
prediction.py  with --real --stages: the whole job's step
"""
