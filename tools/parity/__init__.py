"""The proof that every layout computes what the unsharded model computes: `python -m tools.parity`.

__main__.py   the command
cases.py      which layouts and options are compared
run.py        one case: what each rank does, and how far it is from the reference
row.py        what came of it, and what is allowed
reference.py  the model in plain PyTorch, which shares no code with parallel/
"""
