"""Evaluates the model while it trains (docs/evaluation.md): the loss on held-out text, and tasks:
examples in JSON lines, scored by log-likelihood.

listener.py   evaluates while the run trains; the loss on held-out text
rows.py       reads the examples of tasks (bundled ones are in tasks/), turns them into rows of
              tokens, and the rows' log-likelihoods into measures
scoring.py    the log-likelihood of each row, on one model or through every axis of the mesh
"""
