"""The model's dimensions (the section `model.` of a configuration file)."""

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from declare import FREE, Text, Width, WithKinds, between, section
from errors import UserError
from model.experts import Experts

Kinds = Text | Annotated[tuple[Text, ...], Field(strict=False, min_length=1, max_length=4096)]


class RopeScaling(NamedTuple):
    """The scaling of rotary frequencies for sequences longer than in the original training
    (model/positions.py)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@section("model")
class ModelConfig(
    WithKinds, attention="model.attention", feed_forward="model.feed_forward", router="model.router"
):
    """The dimensions of a Llama-style decoder. The letters D, H, K, E, F and V, as defined here,
    stand for dimensions in shapes throughout the code.

    The options cover Llama 2 to 3.2, Mistral (full attention), Mixtral and Qwen3, dense or not. No
    linear layer has a bias, so models with biases (Qwen2, Phi) are not covered.
    """

    dim: Width  # D: width of the residual stream
    num_layers: Annotated[int, between(1, 4096)]  # L
    num_heads: Annotated[int, between(1, 2**16)]  # H: query heads
    # K: key/value heads; each serves H / K query heads (grouped-query attention)
    num_kv_heads: Annotated[int, between(1, 2**16)]
    ffn_dim: Width  # F: inner width of the gated feed-forward
    vocab_size: Annotated[int, between(1, 2**24)]  # V: at least that of the tokenizer
    # H·E: width of all query heads together; null: dim (Qwen3 and Mistral Nemo have another)
    attention_dim: Width | None = None
    # RMSNorm of each head of q and k before rotation: one weight [E] for q and one for k (Qwen3)
    qk_norm: bool = False
    # Kinds of layers: one for all layers, or a list through which the layers cycle.
    attention: Kinds = "causal"  # one or more files of model/attention/
    # one or more files of model/feed_forward/; auto: experts if experts.count is given, else swiglu
    feed_forward: Kinds = "auto"
    router: Text = "softmax_renormalised"  # of experts: a file of model/router/
    # added to the mean square in every RMSNorm
    norm_eps: Annotated[float, between(1e-30, 1, example=1e-5)] = 1e-5
    # the base of the wavelengths of rotary position embeddings
    rope_theta: Annotated[float, between(1, 1e30, example=10000)] = 500_000.0
    # low rotary frequencies are divided by this (Llama 3.1: 8, 3.2: 32); 1: no scaling
    rope_scaling_factor: Annotated[float, between(1, 1e6, example=8)] = 1.0
    # low frequencies: fewer turns than this over rope_original_length positions
    rope_low_freq_factor: Annotated[float, between(1e-6, 1e6)] = 1.0
    # high frequencies, left unchanged: more turns than this; those in between are interpolated
    rope_high_freq_factor: Annotated[float, between(1e-6, 1e6)] = 4.0
    # sequence length of the original training
    rope_original_length: Annotated[int, between(1, 2**31 - 1, example=8192)] = 8192
    tie_embeddings: bool = False  # the head uses the embedding's weight
    # weight of log²(normaliser) in the training loss (PaLM: 1e-4); not added in evaluation
    z_loss: Annotated[float, between(0, 1000, example=1e-4), FREE] = 0.0
    # auto: Triton on a GPU, PyTorch elsewhere; triton; torch (model/kernels/)
    kernels: Annotated[Literal["auto", "triton", "torch"], FREE] = "auto"
    # auto: the fastest that is known to be right here (model/kernels/attention_choice.py)
    attention_kernel: Annotated[Literal["auto", "cudnn", "flash2", "flash3"], FREE] = "auto"
    # standard deviation of every initial matrix; output projections get 1 / sqrt(2 L) of it
    init_std: Annotated[float, between(0, 1000, example=0.02), FREE] = 0.02

    def __post_init__(self) -> None:
        uneven = self.attention_width % self.num_heads or self.head_dim % 2
        pairs = " (rotary embeddings rotate pairs)"
        if self.attention_dim is not None and uneven:
            why = f"must divide into model.num_heads={self.num_heads} heads of an even width"
            remedy = f"give {self.num_heads} · the width of a head, for example "
            remedy += f"{self.num_heads * 128}, or null for model.dim"
            raise UserError("model.attention_dim", self.attention_dim, why + pairs, remedy)
        if self.attention_dim is None and uneven:
            why = f"model.dim={self.dim} must divide into heads of an even width"
            fits = [h for h in range(1, self.dim // 2 + 1) if self.dim % (2 * h) == 0]
            remedy = f"choose one of {fits[-12:]}, or " if fits else ""
            remedy += f"set model.dim to a multiple of {2 * self.num_heads}"
            raise UserError("model.num_heads", self.num_heads, why + pairs, remedy)
        if self.num_heads % self.num_kv_heads:
            why = f"model.num_heads={self.num_heads} query heads must divide evenly among them"
            fits = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise UserError("model.num_kv_heads", self.num_kv_heads, why, f"choose one of {fits}")
        if self.feed_forward == "auto":  # a run's config.yaml and checkpoints state what it is
            given = vars(self)["experts"]
            count = given.get("count") if isinstance(given, dict) else getattr(given, "count", 0)
            object.__setattr__(self, "feed_forward", "experts" if count else "swiglu")
        self.select("attention", _listed(self.attention))
        listed = _listed(self.feed_forward)
        # whose first layers may be swiglu
        self.select("feed_forward", (*listed, "swiglu") if "experts" in listed else listed)
        self.select("router", [self.router] if self.has_experts else [])
        self._check_experts()
        if not self.rope_low_freq_factor < self.rope_high_freq_factor:
            why = f"must be below model.rope_high_freq_factor={self.rope_high_freq_factor}"
            key, remedy = "model.rope_low_freq_factor", "for example 1 and 4, as in Llama 3.1"
            raise UserError(key, self.rope_low_freq_factor, why, remedy)

    def _check_experts(self) -> None:
        experts = self.find(Experts)
        if experts is None:
            if self.router != ModelConfig.router:
                remedy = "leave it out, or set model.experts.count, for example to 8"
                raise UserError("model.router", self.router, "the model has no experts", remedy)
            return
        if not experts.count:
            remedy = "give the number of experts, for example 8, or set model.feed_forward=swiglu"
            key, why = "model.experts.count", "the model has experts"
            raise UserError(key, 0, why, remedy)
        if not self.layers_with_experts:
            first, key = experts.num_dense_layers, "model.experts.num_dense_layers"
            key, value = (key, first) if first else ("model.feed_forward", self.feed_forward)
            why = f"leaves none of the model.num_layers={self.num_layers} layers for experts"
            raise UserError(key, value, why, "leave at least one")

    @property
    def has_experts(self) -> bool:
        return self.find(Experts) is not None

    @property
    def layers_with_experts(self) -> list[int]:
        return [n for n in range(self.num_layers) if self.feed_forward_of(n) == "experts"]

    @property
    def expert_width(self) -> int:
        """The inner width of each expert."""
        return self.of(Experts).ffn_dim or self.ffn_dim

    @property
    def expert_sides(self) -> dict[str, int]:
        """The sides of an expert's matrices, by the keys that set them."""
        return {"model.experts.ffn_dim": self.expert_width, "model.dim": self.dim}

    def attention_of(self, layer: int) -> str:
        """The kind of attention of block `layer`."""
        return _in_turn(self.attention, layer)

    def feed_forward_of(self, layer: int) -> str:
        """The kind of feed-forward of block `layer`."""
        kind = _in_turn(self.feed_forward, layer)
        is_dense = kind == "experts" and layer < self.of(Experts).num_dense_layers
        return "swiglu" if is_dense else kind

    @property
    def attention_width(self) -> int:  # H·E
        return self.dim if self.attention_dim is None else self.attention_dim

    @property
    def head_dim(self) -> int:  # E
        return self.attention_width // self.num_heads

    @property
    def residual_init_std(self) -> float:
        """The standard deviation of the matrices that write into the residual stream. 2 L
        independent terms are added to it, and their sum should not grow with depth (GPT-2, Radford
        et al. 2019, section 2.3)."""
        return self.init_std / math.sqrt(2 * self.num_layers)

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """The scaling of rotary frequencies; None: they follow from rope_theta unscaled."""
        if self.rope_scaling_factor == 1:
            return None
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        return RopeScaling(self.rope_scaling_factor, low, high, self.rope_original_length)


def _listed(kinds: str | tuple[str, ...]) -> tuple[str, ...]:
    return (kinds,) if isinstance(kinds, str) else kinds


def _in_turn(kinds: str | tuple[str, ...], layer: int) -> str:
    listed = _listed(kinds)
    return listed[layer % len(listed)]
