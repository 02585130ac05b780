"""What is trained: a Llama-style decoder, built directly from the parallel layers.

    tokens ─ embedding ─┬─ blocks.0 ─ … ─ blocks.{L-1} ─┬─ norm ─ head ─ loss
                        │                               │
    a block:   x ─ attention_norm ─ attention ─(+x)─ feed_forward_norm ─ feed_forward ─(+)─

    transformer.py   a stage: blocks, and the embedding or the head
    attention/       kinds of attention; mask.py: what a token sees
    feed_forward/    kinds of feed-forward
    norm.py          RMSNorm
    matmul.py        the products of every linear layer
    positions.py     angles and masks of a micro-batch; documents.py: where its documents begin
    initialise.py    first weights
    config.py        dimensions and kinds
    kernels/         fused operations

A pipeline stage is the same `Transformer` class holding a range of blocks; names are global whoever
holds them. May import `parallel/`, and nothing else of the house but files of the root.
"""
