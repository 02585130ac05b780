"""Mixtures of experts: Mixtral and Qwen3-MoE, in both directions.

    ours     blocks.3.feed_forward.experts.gate.weight           [X, F, D]
    theirs   model.layers.3.mlp.experts.0.gate_proj.weight       [F, D], one tensor for each expert
             …                            X − 1

Their loss for even load is the mean over the tokens of all layers, and counts each of a token's k
choices; ours is a sum over layers and counts a token once (model/router/_base.py). With even load,
both are equal if router_aux_weight = router_aux_loss_coef · k / layers with experts.
"""

from collections.abc import Callable
from typing import Any

from errors import UserError
from model.config import ModelConfig

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
        found: dict[str, Any] = {"router": "softmax_renormalised"}
    else:
        dense, step = get("mlp_only_layers", list, []), get("decoder_sparse_step", int)
        # transformers 5 writes the second name
        count = get("num_experts", int, get("num_local_experts", int, 128))
        has_experts = [
            count > 0 and step > 0 and layer not in dense and (layer + 1) % step == 0
            for layer in range(num_layers)
        ]
        renormalises = get("norm_topk_prob", bool)
        found = {"router": next(r for r, value in ROUTERS.items() if value == renormalises)}
        found["expert_ffn_dim"] = get("moe_intermediate_size", int)
        if not any(has_experts):
            return {}
    found |= {"num_experts": count, "experts_per_token": chosen} | _layers(has_experts)
    share = chosen / max(1, sum(has_experts))
    return found | {"router_aux_weight": get("router_aux_loss_coef", float) * share}


def _layers(has_experts: list[bool]) -> dict[str, Any]:
    """The fields of ModelConfig that say which layers have experts."""
    first = has_experts.index(True) if any(has_experts) else 0
    if all(has_experts[first:]):
        return {"feed_forward": "experts", "num_dense_layers": first}
    kinds = tuple("experts" if has else "swiglu" for has in has_experts)
    lengths = range(2, len(kinds) + 1)
    cycle = next(n for n in lengths if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    return {"feed_forward": kinds[:cycle]}


def architecture_with_experts(model: ModelConfig) -> str:
    """The architecture that computes what `model`, which has experts, computes. Raises UserError if
    there is none."""

    def refuse(key: str, why: str, change: str) -> None:
        remedy = f"keep the checkpoint, which tools.generate reads; or train a model with {change}"
        raise UserError(f"model.{key}", getattr(model, key), why, remedy)

    renormalised = "model.router=softmax_renormalised"
    if model.router not in ROUTERS:
        refuse("router", "their experts are chosen by softmax, without a bias", renormalised)
    if model.num_shared_experts:
        why = "their experts are all chosen, none is shared"
        refuse("num_shared_experts", why, "model.num_shared_experts=0")
    if model.router_scale != 1:
        refuse("router_scale", "their router's weights are not scaled", "model.router_scale=1.0")
    if model.qk_norm:
        return QWEN3_MOE
    mixtral, other = "without model.qk_norm it would be a Mixtral, whose", "model.qk_norm=true, "
    other += "which makes it a Qwen3-MoE"
    if not ROUTERS[model.router]:
        refuse("router", f"{mixtral} router's weights add up to 1", f"{renormalised}, or {other}")
    if dense_layers(model):
        key = "num_dense_layers" if model.num_dense_layers else "feed_forward"
        refuse(key, f"{mixtral} layers all have experts", other)
    return MIXTRAL


def dense_layers(model: ModelConfig) -> list[int]:
    """The layers without experts."""
    layers = range(model.num_layers)
    return [layer for layer in layers if model.feed_forward_of(layer) != "experts"]


def expert_fields(architecture: str, model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for the experts of `model`."""
    if architecture not in NAMES:
        return {}
    dense = dense_layers(model)
    coefficient = model.router_aux_weight * (model.num_layers - len(dense))
    content = {
        "num_experts_per_tok": model.experts_per_token,
        # rounded, so that an imported value is exported as it was
        "router_aux_loss_coef": float(f"{coefficient / model.experts_per_token:.12g}"),
    }
    if architecture == MIXTRAL:
        # their only feed-forwards are experts
        sizes = {"num_local_experts": model.num_experts, "intermediate_size": model.expert_width}
        return content | sizes
    return content | {
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": ROUTERS[model.router],
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
