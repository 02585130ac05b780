"""Triton kernels compiled for GPUs that need not be there: `python -m tools.compile_kernels`.

__main__.py      the command
compiler.py      kernels to machine code, and what that says
targets.py       which GPUs
"""
