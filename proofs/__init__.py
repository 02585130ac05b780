"""What shows that training is right: used by the tests, by forks and on new hardware. No training
and no tool needs it.

parity/    every layout computes the same as one device (python -m proofs.parity, make parity)
strict/    a process group that is as strict about order as NCCL
ranks.py   a pool of processes that are the ranks of many small jobs, one after the other
"""
