"""Pipeline parallelism: each rank holds one or more stages (ranges of layers) and works through a list of actions.

schedule.py  who does what, when: pure functions, no torch
transfer.py  point-to-point between neighbours
runner.py    carries a schedule out
tied.py      the embedding that the first and the last stage share

    rank 0 ▏F0 F1 F2 F3          B0 F4 B1 F5 B2 …
    rank 1 ▏   F0 F1 F2       B0 F3 B1 F4 B2 …       activations go down, gradients come up;
    rank 2 ▏      F0 F1    B0 F2 B1 F3 B2 …          one message per boundary and micro-batch
    rank 3 ▏         F0 B0 F1 B1 F2 B2 …
"""
