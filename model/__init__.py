"""The model: a Llama-style decoder, built directly from the parallel layers.

    tokens ─ embedding ─┬─ blocks.0 ─ … ─ blocks.{L-1} ─┬─ norm ─ head ─ loss
                        │                               │
    a block:   x ─ attention_norm ─ attention ─(+x)─ feed_forward_norm ─ feed_forward ─(+)─

    transformer.py   a pipeline stage: blocks, and the embedding or the head
    attention/       kinds of attention; mask.py: which tokens a token sees; largest_logits.py: the
                     largest logit of each head
    feed_forward/    kinds of feed-forward; router/: how a token chooses experts
    norm.py          RMSNorm
    matmul.py        the products of every linear layer
    linear_cross_entropy.py   the head's projection and the loss, piece by piece
    positions.py     angles and masks of a micro-batch; documents.py: where its documents begin, and
                     which keys a part of a sequence sees
    initialise.py    initial weights
    config.py        dimensions, and kinds of layers; experts.py: the settings of experts
    kernels/         fused operations

Every pipeline stage is a `Transformer` with a range of the blocks; the names of parameters are
global and do not depend on the stage. This package imports `parallel/` and, of the rest of this
repository, only the modules in its root folder.
"""
