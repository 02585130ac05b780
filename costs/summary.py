"""What others ask of the units' records: FLOPs of a token (MFU), and the relative costs of layers
(balance of pipeline stages)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from costs.links import Links
from costs.seconds import Rates
from costs.units import EMBEDDING, HEAD, Setting, Unit, kinds_of_layers, unit
from hardware import H100
from model.config import ModelConfig
from parallel.pipeline.balance import LayerCosts


def blocks(setting: Setting) -> Counter[Unit]:
    """A block of each kind, and how many there are."""
    kinds = Counter(kinds_of_layers(setting.model))
    return Counter({unit(setting, kind): number for kind, number in kinds.items()})


def mean_of_blocks(setting: Setting, figure: Callable[[Unit], float]) -> float:
    """Of a model's blocks, which may be of several kinds."""
    kinds = blocks(setting)
    return sum(figure(block) * number for block, number in kinds.items()) / kinds.total()


def model_flops(of: Unit, whole_attention: bool = False) -> float:
    """Floating-point operations of a unit for one micro-batch, forward and backward, multiply and
    add counted as two, on one tp rank (tp 1: all).

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
def layer_costs(setting: Setting) -> LayerCosts:
    """Seconds of the embedding, of every block and of the head for one micro-batch, forward and
    backward, on H100s: what is computed, and what waits for tp."""
    # without what each kernel costs to launch: for models that are so small, on a CPU, it is little
    device = replace(H100, kernel_seconds=0.0, collective_seconds=0.0)
    links = Links(device, setting.tp, 1, 1, setting.tp)
    rates = Rates(device, links, setting.dtype.itemsize)

    def seconds(name: str) -> float:
        phases = unit(setting, name).whole.phases.values()
        return sum(rates.cost(phase).total for phase in phases)

    kinds = kinds_of_layers(setting.model)
    of_kind = {kind: seconds(kind) for kind in dict.fromkeys(kinds)}
    return LayerCosts(seconds(EMBEDDING), tuple(of_kind[kind] for kind in kinds), seconds(HEAD))
