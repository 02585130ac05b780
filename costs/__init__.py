"""What the model costs, recorded from the code that trains it: nothing here computes a step.

as_on_gpu.py  tensors that have shapes only (torch's meta device), treated as a GPU's
storages.py   sees every storage when it is made and when it is freed
recorder.py   what a computation does: operations, collectives, storages
units.py      the embedding, each kind of block and the head, recorded forward and backward
summary.py    what others ask: FLOPs of a token, relative costs of the layers

A record takes milliseconds and no process group, so a running job may take one. May import
model/ and parallel/.
"""
