"""What others ask of the units' records: FLOPs of a token (MFU), and the relative costs of layers
(balance of pipeline stages)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from costs.recorder import Attention, Moved, Product
from costs.units import EMBEDDING, HEAD, Setting, Unit, kind_of, unit
from hardware import H100
from model.config import ModelConfig
from parallel.pipeline.balance import LayerCosts

OPERATIONS_PER_BYTE = H100.peak_flops / H100.memory_bytes_per_second


def blocks(setting: Setting) -> Counter[Unit]:
    """A block of each kind, and how many there are."""
    kinds = Counter(kind_of(setting.model, layer) for layer in range(setting.model.num_layers))
    return Counter({unit(setting, kind): number for kind, number in kinds.items()})


def mean_of_blocks(setting: Setting, figure: Callable[[Unit], float]) -> float:
    """Of a model's blocks, which may be of several kinds."""
    kinds = blocks(setting)
    return sum(figure(block) * number for block, number in kinds.items()) / kinds.total()


def model_flops(of: Unit, whole_attention: bool = False) -> float:
    """Floating-point operations of a unit for one micro-batch, forward and backward, multiply and
    add counted as two, on one tp rank.

    Without what is computed again, and attention's backward as two forwards: what the model needs,
    not what this code does (PaLM, appendix B). A causal mask counts as half the square of S × S, a
    window as the scores that it leaves; with `whole_attention` all the square, as Megatron-LM
    counts.
    """
    plain = unit(replace(of.setting, activation_checkpointing="none"), of.name)
    forward, backward = plain.whole.phases["forward"], plain.whole.phases["backward"]
    attention = 3 * forward.attention_flops(whole_attention)
    return forward.product_flops + backward.product_flops + attention


@lru_cache(maxsize=1024)
def flops_per_token(model: ModelConfig, seq_len: int, whole_attention: bool = False) -> float:
    """`model_flops` of the whole model, for each token."""
    setting = Setting(model, seq_len)
    ends = sum(model_flops(unit(setting, name), whole_attention) for name in (EMBEDDING, HEAD))
    block = mean_of_blocks(setting, lambda block: model_flops(block, whole_attention))
    return (ends + model.num_layers * block) / seq_len


@lru_cache(maxsize=1024)
def layer_costs(model: ModelConfig, seq_len: int, activation_checkpointing: str) -> LayerCosts:
    """Relative costs of the embedding, a block (of several kinds the mean) and the head, in
    operations per token: a byte moved counts as the operations that an H100 does meanwhile."""
    setting = Setting(model, seq_len, activation_checkpointing=activation_checkpointing)
    embedding, head = (_operations(unit(setting, name)) for name in (EMBEDDING, HEAD))
    costs = embedding, mean_of_blocks(setting, _operations), head
    return LayerCosts(*(each / seq_len for each in costs))


def _operations(of: Unit) -> float:
    """Forward and backward, recomputation included."""
    events = [event for phase in of.whole.phases.values() for event in phase.events]
    computed = sum(event.flops for event in events if isinstance(event, Product | Attention))
    return computed + OPERATIONS_PER_BYTE * sum(e.bytes for e in events if isinstance(e, Moved))
