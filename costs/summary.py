"""Totals over the units' records: FLOPs per token (for MFU), and the relative costs of layers (for
balancing pipeline stages)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from costs.seconds import Links, Rates
from costs.setting import Setting
from costs.units import EMBEDDING, HEAD, Unit, kinds_of_layers, unit
from hardware import H100
from model.config import ModelConfig
from parallel.pipeline.balance import LayerCosts

# From this number of tokens on, seconds are proportional to tokens, because reading the weights
# takes no time beside the products.
PROPORTIONAL = 1 << 17


def blocks(setting: Setting) -> Counter[Unit]:
    """One block of each kind, and how many blocks the model has of it."""
    kinds = Counter(kinds_of_layers(setting.model))
    return Counter({unit(setting, kind): number for kind, number in kinds.items()})


def mean_of_blocks(setting: Setting, figure: Callable[[Unit], float]) -> float:
    """The mean of `figure` over the model's blocks, which may be of several kinds."""
    kinds = blocks(setting)
    return sum(figure(block) * number for block, number in kinds.items()) / kinds.total()


def model_flops(of: Unit, whole_attention: bool = False, document: float | None = None) -> float:
    """The floating-point operations of a unit for one micro-batch, forward and backward, on one tp
    and cp rank; a multiplication and an addition count as two.

    These are the operations that the model needs, not those that this code does (PaLM, appendix B):
    recomputation is left out, and attention's backward counts as two forwards. A causal mask counts
    as half of S × S, a window as the scores inside it; with `whole_attention` all of S × S counts,
    as in Megatron-LM. `document`: the mean over tokens of the length of their packed document, of
    whose square half counts, or the window if that is less.
    """
    plain = unit(replace(of.setting, activation_checkpointing="none"), of.name)
    forward, backward = plain.phases()["forward"], plain.phases()["backward"]
    attention = forward.attention_flops(whole_attention)
    if document is not None:
        causal = forward.attention_flops(whole=True) / 2
        attention = min(attention, causal * document / of.setting.seq_len)
    return forward.product_flops + backward.product_flops + 3 * attention


@lru_cache(maxsize=1024)
def flops_per_token(
    model: ModelConfig, seq_len: int, whole_attention: bool = False, document: float | None = None
) -> float:
    """`model_flops` of the whole model, per token; the same with every attention kernel, so that it
    is known where the wanted one cannot run. Only `math`, for heads whose size is no multiple of 8,
    also computes the scores that a mask hides, and they count."""
    setting = Setting(replace(model, attention_kernel="auto"), seq_len)
    ends = sum(model_flops(unit(setting, name)) for name in (EMBEDDING, HEAD))
    block = mean_of_blocks(setting, lambda block: model_flops(block, whole_attention, document))
    return (ends + model.num_layers * block) / seq_len


@lru_cache(maxsize=1024)
def layer_costs(setting: Setting) -> LayerCosts:
    """Seconds of the embedding, of every block and of the head for one micro-batch, forward and
    backward, on H100s: computation and exposed communication over tp, cp and ep. Of a long
    micro-batch the seconds of some of its sequences: only relative costs matter."""
    sequences = max(1, min(setting.micro_batch_size, PROPORTIONAL // setting.seq_len))
    setting = replace(setting, micro_batch_size=sequences)
    # Without the time to launch kernels, and without waves, in which the products of a small model
    # would all take equally long: on a CPU, where small models run, neither matters.
    device = replace(H100, kernel_seconds=0.0, collective_seconds=0.0, tile=1, multiprocessors=1)
    tp, cp, ep = setting.tp, setting.cp, setting.ep
    links = Links(device, tp, cp, 1, max(tp * cp, ep), cp, ep)
    rates = Rates(device, links, setting.dtype.itemsize)

    def seconds(name: str) -> float:
        phases = unit(setting, name).phases().values()
        return sum(rates.cost(phase).total for phase in phases)

    kinds = kinds_of_layers(setting.model)
    of_kind = {kind: seconds(kind) for kind in dict.fromkeys(kinds)}
    return LayerCosts(seconds(EMBEDDING), tuple(of_kind[kind] for kind in kinds), seconds(HEAD))
