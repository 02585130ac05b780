"""Mixtures of experts: Mixtral and Qwen3-MoE, in both directions.

    ours     blocks.3.feed_forward.experts.gate.weight           [X, F, D]
    theirs   model.layers.3.mlp.experts.0.gate_proj.weight       [F, D], one tensor for each expert
             …                            X − 1

Their loss for even load is the mean over the tokens of all layers, and counts each of a token's k
choices; ours is a sum over layers and counts a token once (model/router/_base.py). With even load,
both are equal if router_aux_weight = router_aux_loss_coef · k / layers with experts.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from errors import UserError
from model.config import ModelConfig
from model.experts import Experts

MIXTRAL, QWEN3_MOE = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
# ours → theirs, for the weights of a block; {} is the number of an expert
NAMES = {
    MIXTRAL: {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.experts.gate": "block_sparse_moe.experts.{}.w1",
        "feed_forward.experts.up": "block_sparse_moe.experts.{}.w3",
        "feed_forward.experts.down": "block_sparse_moe.experts.{}.w2",
    },
    QWEN3_MOE: {
        "feed_forward.router": "mlp.gate",
        "feed_forward.experts.gate": "mlp.experts.{}.gate_proj",
        "feed_forward.experts.up": "mlp.experts.{}.up_proj",
        "feed_forward.experts.down": "mlp.experts.{}.down_proj",
    },
}
ROUTERS = {"softmax": False, "softmax_renormalised": True}  # ours → norm_topk_prob


def read_experts(architecture: str, num_layers: int, get: Callable[..., Any]) -> dict[str, Any]:
    """The values of ModelConfig for the experts of a config.json. get(key, type, null) returns one
    of its values, or `null` if there is none."""
    if architecture not in NAMES:
        return {}
    chosen = get("num_experts_per_tok", int)
    if architecture == MIXTRAL:
        has_experts, count = [True] * num_layers, get("num_local_experts", int)
        router, own = "softmax_renormalised", dict[str, Any]()
    else:
        dense, step = get("mlp_only_layers", list, []), get("decoder_sparse_step", int)
        # transformers 5 writes the second name
        count = get("num_experts", int, get("num_local_experts", int, 128))
        has_experts = [
            count > 0 and step > 0 and layer not in dense and (layer + 1) % step == 0
            for layer in range(num_layers)
        ]
        renormalises = get("norm_topk_prob", bool)
        router = next(r for r, value in ROUTERS.items() if value == renormalises)
        own = {"ffn_dim": get("moe_intermediate_size", int)}
        if not any(has_experts):
            return {}
    own |= {"count": count, "per_token": chosen}
    share = chosen / max(1, sum(has_experts))
    own["router_aux_weight"] = get("router_aux_loss_coef", float) * share
    first = has_experts.index(True) if any(has_experts) else 0
    feed_forward: str | tuple[str, ...] = "experts"
    if all(has_experts[first:]):
        own["num_dense_layers"] = first
    else:
        feed_forward = tuple("experts" if has else "swiglu" for has in has_experts)
    return {"router": router, "feed_forward": feed_forward, "experts": own}


def architecture_with_experts(model: ModelConfig) -> str:
    """The architecture that computes what `model`, which has experts, computes. Raises UserError if
    there is none."""

    def refuse(key: str, why: str, change: str) -> None:
        remedy = f"keep the checkpoint, which tools.generate reads; or train a model with {change}"
        raise UserError(f"model.{key}", attrgetter(key)(model), why, remedy)

    experts, renormalised = model.of(Experts), "model.router=softmax_renormalised"
    if model.router not in ROUTERS:
        refuse("router", "their experts are chosen by softmax, without a bias", renormalised)
    if experts.num_shared:
        why = "their experts are all chosen, none is shared"
        refuse("experts.num_shared", why, "model.experts.num_shared=0")
    if experts.router_scale != 1:
        why = "their router's weights are not scaled"
        refuse("experts.router_scale", why, "model.experts.router_scale=1.0")
    if model.qk_norm:
        return QWEN3_MOE
    mixtral, other = "without model.qk_norm it would be a Mixtral, whose", "model.qk_norm=true, "
    other += "which makes it a Qwen3-MoE"
    if not ROUTERS[model.router]:
        refuse("router", f"{mixtral} router's weights add up to 1", f"{renormalised}, or {other}")
    if dense_layers(model):
        key = "experts.num_dense_layers" if experts.num_dense_layers else "feed_forward"
        refuse(key, f"{mixtral} layers all have experts", other)
    return MIXTRAL


def dense_layers(model: ModelConfig) -> list[int]:
    """The layers without experts."""
    return sorted({*range(model.num_layers)}.difference(model.layers_with_experts))


def expert_fields(architecture: str, model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for the experts of `model`."""
    if architecture not in NAMES:
        return {}
    dense, experts = dense_layers(model), model.of(Experts)
    # without router_aux_loss_coef: a checkpoint does not store router_aux_weight
    content = {"num_experts_per_tok": experts.per_token}
    if architecture == MIXTRAL:
        # their only feed-forwards are experts
        sizes = {"num_local_experts": experts.count, "intermediate_size": model.expert_width}
        return content | sizes
    return content | {
        "num_experts": experts.count,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": ROUTERS[model.router],
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
