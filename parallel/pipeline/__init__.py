"""Pipeline parallelism: each rank holds one or more stages (ranges of layers) and works through a
list of actions.

actions.py    the vocabulary: a schedule is data, each rank's list of actions
schedules.py  who does what, when: GPipe, 1F1B, interleaved, breadth first, ZB-H1, ZB-V, DualPipeV
simulate.py   how long a schedule takes, its bubble and its memory, without running it
lower.py      from a schedule to programs: sends and receives in one order; nobody waits forever
check.py      proves that order, on a network that buffers nothing
balance.py    which stage gets how many layers
runner.py     carries a program out
transfer.py   what a stage hands to another, over the network or on the same rank
tied.py       the embedding that the first and the last stage share

All but the last three are pure functions without torch.

    rank 0 ▏F0 F1 F2 F3          B0 F4 B1 F5 B2 …
    rank 1 ▏   F0 F1 F2       B0 F3 B1 F4 B2 …       activations go down, gradients come up;
    rank 2 ▏      F0 F1    B0 F2 B1 F3 B2 …          one message per boundary and micro-batch
    rank 3 ▏         F0 B0 F1 B1 F2 B2 …
"""
