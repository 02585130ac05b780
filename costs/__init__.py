"""What the model costs, recorded from the code that trains it: nothing here computes a step.

as_on_gpu.py  tensors that have shapes only (torch's meta device), treated as a GPU's
storages.py   sees every storage when it is made and when it is freed
recorder.py   what a computation does: operations, collectives, storages
units.py      the embedding, each kind of block and the head, recorded forward and backward
links.py      seconds of a collective over each axis of the mesh
seconds.py    seconds of what was recorded, at the rates of a device
summary.py    what others ask: FLOPs of a token, costs of the layers

A record takes milliseconds and no process group: every run takes some at its start, for MFU and for
what it says of its stages. A layer that does not run on shapes trains all the same, without these.
May import model/ and parallel/.
"""
