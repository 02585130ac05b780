"""Compiles Triton kernels for GPUs that need not be present: `python -m tools.compile_kernels`.

__main__.py      the command
compiler.py      compiles kernels and inspects the machine code
accesses.py      accesses to global memory in assembly
specimens.py     the calls whose kernels are compiled
targets.py       the GPUs to compile for
"""
