"""Compiles Triton kernels for GPUs that need not be present: `python -m tools.compile_kernels`.

__main__.py      the command
compiler.py      compiles kernels and inspects the machine code
accesses.py      accesses to global memory in assembly
flight.py        bytes that a thread has in flight, from machine code
occupancy.py     programs per multiprocessor, and the bytes that these must have in flight
specimens.py     the calls whose kernels are compiled
targets.py       the GPUs to compile for
"""
