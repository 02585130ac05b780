"""The costs of the model, recorded by running the code that trains it on tensors without data.

as_on_gpu.py  makes the model's code treat such tensors (torch's meta device) as GPU tensors
storages.py   tracks when every storage is allocated and freed
operators.py  what PyTorch's operators read and write, and when the host waits for them
collectives.py  the same of collectives, their groups and their handles
events.py     the operations and collectives of a record
recorder.py   records the operations, collectives and storages of a computation
setting.py    what a record depends on: one rank's part of the model, and its inputs
routing.py    how many rows experts receive, where tensors have no data
units.py      records forward and backward of the embedding, each kind of block and the head
seconds.py    seconds of a recorded computation and of collectives, at the rates of a device
summary.py    totals for other code: FLOPs per token, costs of the layers
timeline.py   what the timeline of a pipeline says: time of the step, bubble, activations held
parameters.py  the model's blocks of each kind, and its number of parameters

A record takes milliseconds and needs no process group. Every run makes some when it starts, to
compute MFU and to report the costs of its pipeline stages. A layer that does not run on the meta
device trains all the same, without these figures. May import model/ and parallel/.
"""
