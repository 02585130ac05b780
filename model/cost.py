"""What each part of the model costs, per token, in forward and backward: for the balance of
pipeline stages.

Matrix products are counted in floating-point operations, everything else in bytes moved; a byte
counts as the operations that the device does in its time (`OPERATIONS_PER_BYTE`).

| part      | operations                   | bytes moved, in elements of the compute dtype        |
|-----------|------------------------------|------------------------------------------------------|
| embedding | none                         | 6 D: row out, and back into the gradient             |
| block     | 6 · its matrices + 6 · S·H·E | 2.5 · (8 D + 10 H·E + 7 F): norms, residuals;        |
|           |                              | rotation, attention's edges; gate, up; and           |
|           |                              | 2.5 · 2 (H + K) E more if heads are normalised       |
| head      | 6 · D · V                    | 6 V: logits written, read by the softmax,            |
|           |                              | overwritten, read by two products                    |

Attention is causal: 6 · S · H·E is half of the whole square (`ModelConfig.flops_per_token`). With
full activation checkpointing a block runs forward twice, a third more; the head does not. (All of
the head's cost falls in forward: kernels/linear_cross_entropy.py.)
"""

from hardware import H100
from model.config import ModelConfig
from parallel.pipeline.balance import LayerCosts

OPERATIONS_PER_BYTE = H100.peak_flops / H100.memory_bytes_per_second
BYTES = 2  # of an element: bfloat16


def layer_costs(model: ModelConfig, seq_len: int, activation_checkpointing: str) -> LayerCosts:
    """Relative costs of the embedding, a block and the head, in operations per token."""
    per_element = BYTES * OPERATIONS_PER_BYTE
    attention = model.dim * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    block = (
        6.0 * (attention + 3 * model.dim * model.ffn_dim) + 6.0 * seq_len * model.attention_width
    )
    normed = 2 * model.head_dim * (model.num_heads + model.num_kv_heads) if model.qk_norm else 0
    block += (
        per_element
        * 2.5
        * (8 * model.dim + 10 * model.attention_width + 7 * model.ffn_dim + normed)
    )
    head = 6.0 * model.dim * model.vocab_size + per_element * 6 * model.vocab_size
    again = 4 / 3 if activation_checkpointing == "full" else 1.0
    return LayerCosts(embedding=per_element * 6.0 * model.dim, block=block * again, head=head)
