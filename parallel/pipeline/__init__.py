"""Pipeline parallelism: each rank holds one or more stages (ranges of layers) and executes a list
of actions.

actions.py    the vocabulary: a schedule is data, a list of actions for each rank
schedules.py  the schedules: GPipe, 1F1B, interleaved, breadth first, ZB-H1, ZB-V, DualPipeV
simulate.py   when each rank runs each action of a schedule, without running it
lower.py      turns a schedule into programs, with sends and receives in an order without deadlock
check.py      proves schedules and programs correct, on a network that buffers nothing
balance.py    how many layers each stage gets
runner.py     executes a program
transfer.py   passes tensors from stage to stage, over the network or on the same rank
tied.py       the embedding that the first and the last stage share

All but the last three are pure Python without torch.

    rank 0 ▏F0 F1 F2 F3          B0 F4 B1 F5 B2 …
    rank 1 ▏   F0 F1 F2       B0 F3 B1 F4 B2 …       activations go down, gradients come up;
    rank 2 ▏      F0 F1    B0 F2 B1 F3 B2 …          one message per boundary and micro-batch
    rank 3 ▏         F0 B0 F1 B1 F2 B2 …
"""
