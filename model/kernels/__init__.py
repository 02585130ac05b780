"""Fused operations. Each has its own file, with its mathematics, its Triton kernels and a plain
PyTorch implementation.

    backend.py                chooses between Triton and PyTorch
    triton_interpreter.py     bfloat16 in Triton's CPU interpreter
    rms_norm.py               RMSNorm; residual addition and RMSNorm in one pass
    rotary.py                 rotary embedding of queries and keys in one launch
    norm_rotary.py            the norms of queries and keys, and rotary embedding
    swiglu.py                 the gate of the feed-forward layer
    weighted_swiglu.py        the same of an expert's rows, each times its weight by the router
    grouped_matmul.py         each expert's rows times its own matrix
    token_rows.py             from tokens to the rows of their experts and back
    attention.py              torch's own kernels of attention
    attention_choice.py       which of them runs, and why
    cross_entropy.py          the loss and its gradient, of a rank's columns of the vocabulary
    multi_tensor.py           one launch over many tensors, used by the next two files
    gradient_norm.py          the norm of all gradients
    adamw.py                  clipping and the optimizer update
    bit_hash.py               a hash of all bits, to compare the numbers of ranks

The PyTorch implementation is the specification, and runs where there is no GPU
(`model.kernels=auto`). Kernels compute in float32 and round once, when they store. Given float64
they compute in float64, so that parity with an unsharded model can be proved with them. Attention
has no kernel of ours; of grouped products, only the weight gradient has one.

The files count the bytes that each kernel moves, because the kernels are bound by memory: they do a
few operations per byte, and a GPU does hundreds in the time that one byte takes. A kernel therefore
runs at the speed of memory if it moves every byte only once.

Each kernel is a `torch.library` operation (`torch.ops.lattice.…`). One with results has a fake
implementation, which gives their shapes. The compiler, activation checkpointing and fake tensors
see one operation and need not look inside. docs/kernels.md explains how they are tested.
"""
