"""Proves that every layout computes the same as the unsharded model: `python -m proofs.parity`.

__main__.py           the command
cases.py              the layouts and options that are compared
chosen.py             cases chosen by hand: schedules, context parallelism, kernels, experts
run.py                runs one case on all ranks, and compares it with the reference; the bounds
reference.py          the model in plain PyTorch, which shares no code with parallel/
reference_KIND.py     its attention, feed-forward, router or optimizer of this kind
reference_training.py its optimizer steps
"""
