"""Fused operations: one file each, with its mathematics, its Triton kernels, and the same in plain
PyTorch.

    backend.py                which of the two runs; Triton only where it can
    rms_norm.py               norm; residual sum and norm in one pass
    rotary.py                 queries and keys turned in one launch
    swiglu.py                 the gate of the feed-forward
    cross_entropy.py          the loss over a vocabulary cut over tp
    linear_cross_entropy.py   the head's projection and the loss, without the logits in memory
    multi_tensor.py           many tensors in one launch: for the two that follow
    gradient_norm.py          the norm of all gradients
    adamw.py                  clipping and the update

The PyTorch version is the specification, and what runs where there is no GPU
(`model.kernels=auto`). Kernels compute in float32 and round once, when they store; given float64
they compute in float64, so that parity with an unsharded model can be proved with them. What they
move is what is counted: they do a few operations per byte, and a GPU does hundreds in the time of
one, so a kernel is as fast as the memory if every byte travels once. Each file says how many that
is.

Each kernel is a `torch.library` operation (`torch.ops.lattice.…`) with a rule for tensors without
data: the compiler, activation checkpointing and fake tensors see one operation and need not look
inside. docs/kernels.md tells the story.
"""
