"""Maps the fields of config.json and the names of tensors between Hugging Face and Lattice.

A folder is either supported completely or refused: the message gives the key and the value with
which transformers would compute something that Lattice does not. Rotary embeddings pair the two
halves of a head in both (model/kernels/rotary.py), so no weight is permuted.

Keys that are not in the file have the defaults of transformers. transformers 5 writes
`rope_parameters` and `dtype`, and version 4 wrote `rope_theta`, `rope_scaling` and `torch_dtype`.
Both versions read the older names, so those are written here.

Mixtures of experts have one tensor for each expert there, and one for all of them here:

    ours     blocks.3.feed_forward.experts.gate.weight           [X, F, D]
    theirs   model.layers.3.mlp.experts.0.gate_proj.weight       [F, D], one tensor for each expert
             …                            X − 1

Their loss for even load is the mean over the tokens of all layers, and counts each of a token's k
choices; ours is a sum over layers and counts a token once (model/router/_base.py). With even load,
both are equal if router_aux_weight = router_aux_loss_coef · k / layers with experts.
"""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from data.contents import first_bytes, pointer
from errors import UserError, is_file
from model.config import ModelConfig
from model.experts import Experts
from tools.huggingface.checkpoint_reader import shapes_of

CONFIG = "config.json"
MIXTRAL, QWEN3_MOE = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
# ours → theirs, where only the name differs
FIELDS = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# The architectures that Lattice's model covers, and the values in which they differ if config.json
# does not state them; None: derived from num_attention_heads and hidden_size.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "num_key_value_heads": None, "head_dim": None},
    "MistralForCausalLM": {"model_type": "mistral", "num_key_value_heads": 8, "head_dim": None,
                           "sliding_window": 4096},
    # norms of queries and keys (qk_norm)
    "Qwen3ForCausalLM": {"model_type": "qwen3", "num_key_value_heads": 32, "head_dim": 128,
                         "sliding_window": 4096},
    MIXTRAL: {"model_type": "mixtral", "num_key_value_heads": 8, "head_dim": None,
              "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
              "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
    QWEN3_MOE: {"model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": None,
                "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
                "decoder_sparse_step": 1, "router_aux_loss_coef": 0.001,
                "sliding_window": 4096},
}  # fmt: skip
WITH_WINDOW = ("MistralForCausalLM", MIXTRAL)  # sliding_window is used wherever it is given
WITH_QK_NORM = ("Qwen3ForCausalLM", QWEN3_MOE)
DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
HINTS = get_type_hints(ModelConfig)
# theirs → the only value with which their code computes the same as ours, and why
MUST_BE: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the gate of the feed-forward is silu here"),
    "attention_bias": (False, "no linear layer has a bias here"),
    "mlp_bias": (False, "no linear layer has a bias here"),
    "is_causal": (True, "no token attends to later ones here"),
    "partial_rotary_factor": (1.0, "rotary embedding covers whole heads here"),
    "quantization_config": (None, "quantized weights are not supported"),
    "auto_map": (None, "the folder has custom code, which may compute anything"),
}
OTHER_MODEL = "import another model: Llama 2 to 3.2, Mistral or Mixtral without a sliding window, "
OTHER_MODEL += "Qwen3, Qwen3-MoE"
COPY_AGAIN = (
    "copy the folder again: it needs config.json and each of its model*.safetensors; GGUF and"
    " publishers' own formats are not supported"
)
# ours → theirs, in rope_scaling with rope_type llama3 (Llama 3.1 and 3.2)
ROPE = {
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}

# ours → theirs, for the weights of a block and for all others
BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
OTHERS = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
# the same for the weights of experts; {} is the number of one
EXPERTS = {
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
# The kinds of layers that their code supports.
KINDS = {"attention": ["causal"], "feed_forward": ["swiglu", "experts"]}


class Parameter(NamedTuple):
    """One of their tensors."""

    ours: str  # the tensor that contains it
    theirs: str
    our_shape: tuple[int, ...]
    expert: int | None = None  # the index of theirs in ours; None: they are the same

    @property
    def shape(self) -> tuple[int, ...]:
        return self.our_shape if self.expert is None else self.our_shape[1:]


def parameters(model: ModelConfig) -> list[Parameter]:
    """Every one of their tensors, in the order of our layers, without a tied head.

    Raises UserError if their code does not support the model.
    """
    block = BLOCK | EXPERTS.get(architecture_of(model), {})
    found = []
    for ours, shape in shapes_of(model).items():
        name, _, weight = ours.rpartition(".")
        theirs = OTHERS.get(name)
        if theirs is None:
            _, layer, name = name.split(".", 2)
            theirs = f"model.layers.{layer}.{block[name]}"
        for expert in range(shape[0]) if "{}" in theirs else [None]:
            found.append(Parameter(ours, f"{theirs.format(expert)}.{weight}", shape, expert))
    return found


def architecture_of(model: ModelConfig) -> str:
    """The architecture as which a model is exported. Raises UserError if none computes the same."""
    for key, kinds in KINDS.items():
        value = getattr(model, key)
        if not set([value] if isinstance(value, str) else value) <= set(kinds):
            why = f"the supported Hugging Face models have only {' and '.join(kinds)} layers"
            remedy = "keep the checkpoint, which tools.generate reads; or train a model with "
            raise UserError(f"model.{key}", value, why, f"{remedy}model.{key}={kinds[0]}")
    if model.has_experts:
        return architecture_with_experts(model)
    if model.qk_norm:
        return "Qwen3ForCausalLM"
    # transformers' Llama refuses such a width, although its computation would be the same
    return "MistralForCausalLM" if model.dim % model.num_heads else "LlamaForCausalLM"


def refuse_foreign(folder: Path, key: str) -> None:
    """Raises UserError with this key if `folder` cannot be read, if its weights change another
    model's, or if it is only the name of a model on the hub."""
    try:
        has_adapter = is_file(folder / "adapter_config.json")
        is_missing = not folder.exists() and not folder.parent.exists()
    except OSError as error:
        why, remedy = f"it cannot be read ({error.strerror})", "give a folder that you may read"
        raise UserError(key, str(folder), why, remedy) from None
    if has_adapter:
        why = "it has an adapter, which changes another model's weights"
        remedy = "merge it with that model (peft: merge_and_unload), and give the result"
        raise UserError(key, str(folder), why, remedy)
    if is_missing and re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        why = "there is no such folder, and nothing is downloaded from the Hugging Face hub"
        remedy = f"download it: `hf download {folder} --local-dir {folder.name}`, and give "
        raise UserError(key, str(folder), why, f"{remedy}{key} {folder.name}")


class HuggingFaceConfig:
    """A folder's config.json. Raises UserError with the key at fault if the model is not supported,
    and with `key` if the file cannot be read.

    model: its dimensions. max_length: the longest sequence it is meant for, in tokens.
    """

    def __init__(self, folder: Path, key: str = "--hf") -> None:
        self.path = folder / CONFIG
        self._stated = read_json(self.path, key)
        named = self._stated.get("architectures")
        architecture = str(named[0]) if isinstance(named, list) and len(named) == 1 else ""
        if architecture not in ARCHITECTURES:
            why = f"only {', '.join(ARCHITECTURES)} are supported"
            raise self._refusal("architectures", named, why)
        defaults = DEFAULTS | ARCHITECTURES[architecture]
        self._content = defaults | self._stated
        self._one(("model_type", self._stated.get("model_type")),
                  ("architectures", defaults["model_type"]))  # fmt: skip
        self._one(*((key, self._stated.get(key)) for key in ("num_experts", "num_local_experts")))
        for key, (only, why) in MUST_BE.items():
            if self._stated.get(key) not in (None, only):
                raise self._refusal(key, self._stated[key], why)
        self.max_length: int = self._get("max_position_embeddings", int)
        self._refuse_windows(architecture)

        heads = self._get("num_attention_heads", int)
        self._content["num_key_value_heads"] = self._get("num_key_value_heads", int, null=heads)
        values = {ours: self._get(theirs, HINTS[ours]) for ours, theirs in FIELDS.items()}
        attention_dim = heads * self._get("head_dim", int, null=values["dim"] // max(heads, 1))
        if attention_dim != values["dim"]:
            values["attention_dim"] = attention_dim
        values |= read_experts(architecture, values["num_layers"], self._get)
        values |= self._rope(defaults["rope_theta"])
        self.model = ModelConfig(**values, qk_norm=architecture in WITH_QK_NORM)

    def _rope(self, default_theta: float) -> dict[str, Any]:
        """The values of ModelConfig's fields that begin with rope."""
        thetas: list[tuple[str, Any]] = [("rope_theta", self._stated.get("rope_theta"))]
        scalings: list[tuple[str, dict[str, Any]]] = []
        for key in ("rope_scaling", "rope_parameters"):
            if rope := dict(self._get(key, dict, {})):
                thetas.append((key, rope.pop("rope_theta", None)))
                scalings.append((key, {"rope_type": rope.pop("type", "default")} | rope))
        theta, rope = self._one(*thetas), self._one(*scalings)
        self._content["rope_theta"] = default_theta if theta is None else theta
        found = {"rope_theta": self._get("rope_theta", float)}
        if not scalings:
            return found
        key = scalings[0][0]
        by_layer = any(isinstance(value, dict) for value in rope.values())
        if rope["rope_type"] not in ("default", "llama3") or by_layer:
            why = "only the rope_type default and llama3 are supported, the same in all layers"
            raise self._refusal(key, self._stated[key], why)
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise self._refusal(key, self._stated[key], MUST_BE["partial_rotary_factor"][1])
        if rope["rope_type"] == "llama3":
            name = ROPE["rope_original_length"]  # transformers 5 prefers that of the top level
            stated = self._one((name, self._stated.get(name)), (key, rope.get(name)))
            rope[name] = self.max_length if stated is None else stated
            self._content |= {f"{key}.{name}": value for name, value in rope.items()}
            found |= {
                ours: self._get(f"{key}.{theirs}", HINTS[ours]) for ours, theirs in ROPE.items()
            }
        return found

    def _refuse_windows(self, architecture: str) -> None:
        """Raises UserError for a window shorter than the longest sequence: ours attends to all."""
        used = architecture in WITH_WINDOW or (
            architecture in WITH_QK_NORM and self._content.get("use_sliding_window")
        )
        window = self._get("sliding_window", int, null=self.max_length) if used else self.max_length
        if window < self.max_length:
            why = f"attention to max_position_embeddings={self.max_length} tokens would be limited"
            remedy = f"set max_position_embeddings to {window} in config.json: up to that length "
            remedy += "both compute the same"
            raise self._refusal("sliding_window", window, why, remedy)
        kinds = self._get("layer_types", list, [])
        if not used and any(kind != "full_attention" for kind in kinds):
            raise self._refusal("layer_types", kinds, "every layer's attention is full here")

    def _one(self, *facts: tuple[str, Any]) -> Any:
        """The value of a fact that may be stated under several keys; None: under none. Raises
        UserError if two differ."""
        stated = [fact for fact in facts if fact[1] is not None]
        for (key, value), (other, said) in pairwise(stated):
            if value != said:
                why = f"{other} says {said!r}, and both are the same fact"
                raise self._refusal(key, value, why, "correct the one that is wrong")
        return stated[0][1] if stated else None

    def _get(self, key: str, kind: type, null: Any = None) -> Any:
        """The value of `key`, or `null` if it is missing or None. Raises UserError unless it has
        the type `kind`."""
        value = self._content.get(key)
        value = null if value is None else value
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            why = f"it must be of type {kind.__name__}"
            raise self._refusal(key, value, why, "correct config.json, or copy it again")
        return value

    def _refusal(self, key: str, value: Any, why: str, remedy: str = OTHER_MODEL) -> UserError:
        return UserError(f"{self.path}: {key}", value, why, remedy)


def config_json(model: ModelConfig, *, dtype: str, max_length: int) -> dict[str, Any]:
    """The config.json of an exported model, without bos and eos. dtype: that of its tensors,
    `float32` or `bfloat16`."""
    architecture = architecture_of(model)
    kind = ARCHITECTURES[architecture]["model_type"]
    scaling = {theirs: getattr(model, ours) for ours, theirs in ROPE.items()}
    return {
        "architectures": [architecture],
        "model_type": kind,
        **{theirs: getattr(model, ours) for ours, theirs in FIELDS.items()},
        "head_dim": model.head_dim,
        "max_position_embeddings": max_length,
        "rope_theta": model.rope_theta,
        "rope_scaling": {"rope_type": "llama3"} | scaling if model.rope_scaling else None,
        "hidden_act": "silu",
        "attention_bias": False,
        **({"mlp_bias": False} if kind == "llama" else {"sliding_window": None}),
        **expert_fields(architecture, model),
        "torch_dtype": dtype,
    }


def read_json(path: Path, key: str, remedy: str = COPY_AGAIN) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises UserError with this key and remedy."""
    why = "it is not a JSON object"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        what, remedy = pointer(first_bytes(path)) or (f"not JSON: {error}", remedy)
        why = f"it is {what}"
    raise UserError(key, str(path), why, remedy)


# --- mixtures of experts ---


def read_experts(architecture: str, num_layers: int, get: Callable[..., Any]) -> dict[str, Any]:
    """The values of ModelConfig for the experts of a config.json. get(key, type, null) returns one
    of its values, or `null` if there is none."""
    if architecture not in EXPERTS:
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
    if architecture not in EXPERTS:
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
