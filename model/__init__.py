"""What is trained: a Llama-style decoder, built directly from the parallel layers.

    tokens ─ embedding ─┬─ blocks.0 ─ … ─ blocks.{L-1} ─┬─ norm ─ head ─ loss
                        │                               │
    a block:   x ─ attention_norm ─ attention ─(+x)─ feed_forward_norm ─ feed_forward ─(+)─

A pipeline stage is the same `Transformer` class holding a range of blocks; names are global whoever
holds them. `model/` may import `parallel/`, `errors` and `settings`, and nothing else of the house.
"""
