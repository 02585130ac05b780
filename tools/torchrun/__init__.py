"""torchrun whose ranks need not import the program: `python -m tools.torchrun`.

__main__.py   the command
program.py    what is imported once, by the process from which ranks are forked
"""
