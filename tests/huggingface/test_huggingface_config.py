"""config.json: published ones are read correctly, written ones read back, and unsupported models
refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from costs.parameters import num_parameters
from errors import UserError
from model.config import ModelConfig
from tests.huggingface import huggingface_models
from tools.huggingface.config import HuggingFaceConfig, config_json, parameters
from tools.import_hf import said

SMALL = huggingface_models.SMALL | {"architectures": ["LlamaForCausalLM"]}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
MIXTRAL = huggingface_models.CASES["Mixtral"].config | {"architectures": ["MixtralForCausalLM"]}
QWEN_MOE = huggingface_models.CASES["Qwen3-MoE, a dense layer"].config | {
    "architectures": ["Qwen3MoeForCausalLM"]
}
# model → (published configuration, number of parameters)
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3.1 8B": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
         "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "pretraining_tp": 1, "rms_norm_eps": 1e-05,
         "rope_scaling": LLAMA31 | {"original_max_position_embeddings": 8192},
         "rope_theta": 500000.0, "vocab_size": 128256},
        8_030_261_248,
    ),
    "Qwen3 30B-A3B": (
        {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
         "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
         "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
         "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
         "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
         "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
         "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
         "use_sliding_window": False, "vocab_size": 151936},
        30_532_122_624,
    ),
}  # fmt: skip


def read(folder: Path, content: dict[str, Any]) -> HuggingFaceConfig:
    (folder / "config.json").write_text(json.dumps(content))
    return HuggingFaceConfig(folder)


def written(model: ModelConfig, max_length: int = 128) -> dict[str, Any]:
    return config_json(model, dtype="float32", max_length=max_length)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(tmp_path: Path, name: str) -> None:
    """Published configurations give the right number of parameters, by formula and by the table of
    tensors. The config.json that we write for them reads back the same."""
    content, count = PUBLISHED[name]
    found = read(tmp_path, content)
    assert num_parameters(found.model) == count
    assert sum(torch.Size(p.shape).numel() for p in parameters(found.model)) == count
    ours = written(found.model, found.max_length)
    again = read(tmp_path, ours)
    assert (again.model, again.max_length) == (found.model, found.max_length)
    if found.model.has_experts:  # what is written says what was published
        assert {key: ours.get(key, content[key]) for key in content} == content


def test_versions_of_transformers_say_rope_alike(tmp_path: Path) -> None:
    content, _ = PUBLISHED["Llama 3.1 8B"]
    old = {key: value for key, value in content.items() if not key.startswith("rope")}
    scaling, theta = content["rope_scaling"], content["rope_theta"]
    older = {"type": "llama3", **{k: v for k, v in scaling.items() if k != "rope_type"}}
    ropes: list[dict[str, Any]] = [
        {"rope_scaling": scaling, "rope_theta": theta},
        {"rope_parameters": scaling | {"rope_theta": theta}},
        {"rope_scaling": older, "rope_theta": int(theta)},
        {"rope_scaling": LLAMA31, "rope_theta": theta, "original_max_position_embeddings": 8192},
    ]
    models = [read(tmp_path, old | rope).model for rope in ropes]
    assert models == models[:1] * 4
    assert models[0].rope_scaling == (8.0, 1.0, 4.0, 8192)
    assert read(tmp_path, old).model.rope_theta == 10_000.0


DENSE = {
    "none": ([], 1, "experts", 0),
    "the first, by the step": ([], 4, "experts", 3),
    "every second": ([], 2, ("swiglu", "experts") * 2, 0),
    "one in the middle": ([1], 1, ("experts", "swiglu", "experts", "experts"), 0),
    "all": ([0, 1, 2, 3], 1, "swiglu", None),
}


@pytest.mark.parametrize("name", DENSE)
def test_which_layers_are_dense(tmp_path: Path, name: str) -> None:
    """The layers with experts are those that transformers makes, and our config.json names them
    again."""
    dense, step, feed_forward, first = DENSE[name]
    content = QWEN_MOE | {"mlp_only_layers": dense, "decoder_sparse_step": step}
    model = read(tmp_path, content).model
    assert model.feed_forward == feed_forward
    assert (model.experts and model.experts.num_dense_layers) == first
    theirs = [(i + 1) % step == 0 and i not in dense for i in range(4)]
    assert [model.feed_forward_of(i) == "experts" for i in range(4)] == theirs
    assert read(tmp_path, written(model)).model == model


def test_what_older_and_newer_files_leave_out(tmp_path: Path) -> None:
    """Missing keys have the defaults of transformers, and both names of num_experts are read. A
    window that hides nothing is none."""
    assert read(tmp_path, SMALL | MISTRAL | {"sliding_window": 128}).max_length == 128
    old = {key: SMALL[key] for key in SMALL.keys() - {"num_key_value_heads"}}
    assert read(tmp_path, old).model.num_kv_heads == SMALL["num_attention_heads"]
    newer = QWEN_MOE | {"num_local_experts": QWEN_MOE["num_experts"]}
    del newer["num_experts"]
    assert read(tmp_path, newer).model == read(tmp_path, QWEN_MOE).model
    left_out = {"num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"}
    model = read(tmp_path, {key: QWEN_MOE[key] for key in QWEN_MOE.keys() - left_out}).model
    own = model.experts
    found = own.count, own.per_token, model.router, own.ffn_dim
    assert found == (128, 8, "softmax", 768)


# changes of a configuration, the last of which is refused
REFUSED: dict[str, dict[str, Any]] = {
    "a new family": {"architectures": ["NewForCausalLM"]},
    "bias": {"attention_bias": True},
    "activation": {"hidden_act": "gelu"},
    "attention to later tokens": {"is_causal": False},
    "quantized": {"quantization_config": {"bits": 4}},
    "its own code": {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "half rotated, newer": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "by layer": {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "window": MISTRAL | {"sliding_window": 64},
    "window by default": MISTRAL | {"max_position_embeddings": 8192},
    "window of Qwen3": {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True,
                        "sliding_window": 64},
    "window of Mixtral": MIXTRAL | {"sliding_window": 64},
    "layers of kinds": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "missing": {"hidden_size": None},
    "text for a number": {"vocab_size": "800"},
    "half a scaling": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "two original lengths": {
        "rope_scaling": LLAMA31 | {"original_max_position_embeddings": 8192},
        "original_max_position_embeddings": 4096},
}  # fmt: skip
SAID_OTHERWISE = {  # where the message does not begin with that key and value
    "a new family": "architectures = ['NewForCausalLM']: only LlamaForCausalLM, ",
    "window by default": "sliding_window = 4096: ",
    "half a scaling": "rope_scaling.low_freq_factor = None: ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_model_is_refused(tmp_path: Path, name: str) -> None:
    *_, (key, value) = REFUSED[name].items()
    with pytest.raises(UserError) as refusal:
        read(tmp_path, SMALL | REFUSED[name])
    assert SAID_OTHERWISE.get(name, f"{key} = {value!r}: ") in str(refusal.value)
    assert "remedy: " in str(refusal.value)


NOT_EXPORTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "bias": ({"router": "sigmoid_bias"}, "model.router", "router=softmax_renormalised"),
    "shared": ({"experts": {"num_shared": 1}}, "model.experts.num_shared",
               "num_shared=0"),
    "scaled": ({"experts": {"router_scale": 2.5}}, "model.experts.router_scale",
               "router_scale=1.0"),
    "windows": ({"attention": "sliding_window", "sliding_window": {"window": 5}},
                "model.attention", "attention=causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_what_their_models_lack_is_not_exported(tmp_path: Path, name: str) -> None:
    """Control: without the change, the model is exported, and keys of training are free."""
    changes, key, remedy = NOT_EXPORTED[name]
    model = read(tmp_path, QWEN_MOE).model
    own = dataclasses.replace(model.experts, num_dense_layers=0)
    model = dataclasses.replace(model, experts=own)
    free = dataclasses.replace(own, router_aux_weight=0.5, router_z_weight=0.5)
    assert parameters(dataclasses.replace(model, experts=free)) == parameters(model)
    # in the file model.yaml of an import; a checkpoint does not store it, so no export says it
    assert said(dataclasses.replace(model, experts=free))["experts"]["router_aux_weight"] == 0.5
    assert "router_aux_loss_coef" not in written(model)
    if "experts" in changes:
        changes = {"experts": dataclasses.replace(own, **changes["experts"])}
    for refuse in (parameters, written):
        with pytest.raises(UserError) as refusal:
            refuse(dataclasses.replace(model, **changes))
        assert refusal.value.key == key
        assert remedy in refusal.value.remedy
