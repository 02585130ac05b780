"""What becomes of the Triton kernels on GPUs that need not be there: `python -m tools.compile_kernels`.

__main__.py      the command
compiler.py      kernels to machine code, and what that says
targets.py       which GPUs
"""
