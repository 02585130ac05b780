"""Benchmarks: each program measures both sides of a comparison in one run, and writes its results
to results/. (`make bench` and `make bench-gpu` run them; docs/proofs.md lists what they compare.)

compare.py        options; results, with the machine and the versions

experts.py        a mixture of experts with a dense model
optimizers.py     Muon with AdamW: steps to a held-out loss
plan_accuracy.py  the planner with rehearsals, with published rows (published/)
gpu/              what needs a GPU
"""
