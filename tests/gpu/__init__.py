"""Tests that need a GPU (`pytest -m gpu`): most of `make bench-gpu PART=right`. Without one they
are skipped; `make bench-gpu` then runs those that have tiny sizes, in Triton's interpreter.

Beside them are their controls, which need no GPU.
"""
