"""Benchmarks: each program measures both sides of a comparison in one run, and writes its results
to results/. (`make bench` and `make bench-gpu` run them; docs/proofs.md lists what they compare.)

compare.py        taking turns, ratios; results, with the machine and the versions

train_cpu.py      a 3D run with torchrun, tools.torchrun, one process, Hugging Face's Llama
experts.py        a mixture of experts with a dense model, with Hugging Face's Mixtral
optimizers.py     Muon with AdamW: steps to a held-out loss
plan_accuracy.py  the planner with rehearsals, with published rows (published/)
gpu/              what needs a GPU
"""
