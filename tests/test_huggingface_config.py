"""config.json: published ones are read correctly, written ones read back, and unsupported models
refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from errors import UserError
from model.transformer import num_parameters
from tools.huggingface.config import HuggingFaceConfig, config_json, parameters

SMALL = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
         "vocab_size": 800, "max_position_embeddings": 128}  # fmt: skip
# model → (published configuration, number of parameters)
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 2 7B": (
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "rms_norm_eps": 1e-05, "rope_scaling": None, "vocab_size": 32000},
        6_738_415_616,
    ),
    "Llama 3.1 8B": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
         "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "pretraining_tp": 1, "rms_norm_eps": 1e-05,
         "rope_scaling": LLAMA31 | {"original_max_position_embeddings": 8192},
         "rope_theta": 500000.0, "vocab_size": 128256},
        8_030_261_248,
    ),
    "Llama 3.2 1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_parameters": LLAMA31
            # as version 5 of transformers writes it
            | {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        1_235_814_400,
    ),
    "Mistral Nemo": (
        {"architectures": ["MistralForCausalLM"], "head_dim": 128, "hidden_size": 5120,
         "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
         "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
         "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072},
        12_247_782_400,
    ),
    "Qwen3 0.6B": (
        {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
         "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
         "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
         "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
         "use_sliding_window": False, "vocab_size": 151936},
        596_049_920,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(tmp_path: Path, name: str) -> None:
    """Published configurations give the right number of parameters, by formula and by the table of
    tensors. The config.json that we write for them reads back the same."""
    content, count = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    read = HuggingFaceConfig(tmp_path)
    assert num_parameters(read.model) == count
    assert sum(torch.Size(p.shape).numel() for p in parameters(read.model)) == count
    written = config_json(read.model, dtype="bfloat16", max_length=read.max_length)
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = HuggingFaceConfig(tmp_path)
    assert (again.model, again.max_length) == (read.model, read.max_length)


def test_versions_of_transformers_say_rope_alike(tmp_path: Path) -> None:
    content, _ = PUBLISHED["Llama 3.1 8B"]
    old = {key: value for key, value in content.items() if not key.startswith("rope")}
    scaling, theta = content["rope_scaling"], content["rope_theta"]
    models = []
    for rope in (
        {"rope_scaling": scaling, "rope_theta": theta},
        {"rope_parameters": scaling | {"rope_theta": theta}},
        {
            "rope_scaling": {
                "type": "llama3",
                **{k: v for k, v in scaling.items() if k != "rope_type"},
            },
            "rope_theta": int(theta),
        },
    ):
        (tmp_path / "config.json").write_text(json.dumps(old | rope))
        models.append(HuggingFaceConfig(tmp_path).model)
    assert models == models[:1] * 3
    assert models[0].rope_scaling == (8.0, 1.0, 4.0, 8192)
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert HuggingFaceConfig(tmp_path).model.rope_theta == 10_000.0


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("another model", {"architectures": ["Qwen2ForCausalLM"]},
     "architectures = ['Qwen2ForCausalLM']"),
    ("Qwen 2", {"architectures": ["Qwen2ForCausalLM"]}, "queries, keys and values have biases"),
    ("Gemma 2", {"architectures": ["Gemma2ForCausalLM"]}, "soft caps of scores and logits"),
    ("OLMo 2", {"architectures": ["Olmo2ForCausalLM"]}, "its norms follow attention"),
    ("a new family", {"architectures": ["NewForCausalLM"], "alibi": True, "logit_scale": 2.0},
     "are supported, and they have no alibi, logit_scale"),
    ("many new fields", {"architectures": ["New"]} | {f"field_{i}": 1 for i in range(20)},
     "field_15, 12 other fields"),
    ("no name", {"architectures": [["Llama"]]}, "architectures = [['Llama']]"),
    ("none", {"architectures": None}, "architectures = None"),
    ("bias", {"attention_bias": True}, "attention_bias = True"),
    ("bias of the feed-forward", {"mlp_bias": True}, "mlp_bias = True"),
    ("activation", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("quantized", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
    ("its own code", {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map = "),
    ("linear rope", {"rope_scaling": {"type": "linear", "factor": 2.0}},
     "rope_scaling = {'type': 'linear'"),
    ("yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
     "rope_parameters = {'rope_type': 'yarn'"),
    ("half rotated", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("half rotated, newer", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "rope_parameters = "),
    ("by layer", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
     "rope_parameters = "),
    ("window", {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
     "sliding_window = 64"),
    ("window by default",
     {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},
     "sliding_window = 4096"),
    ("window of Qwen3",
     {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 64},
     "sliding_window = 64"),
    ("layers of kinds", {"layer_types": ["full_attention", "sliding_attention"] * 2},
     "layer_types = "),
    ("missing", {"hidden_size": None}, "hidden_size = None"),
    ("text for a number", {"vocab_size": "800"}, "vocab_size = '800'"),
    ("half a scaling", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
     "rope_scaling.low_freq_factor = None"),
    ("heads", {"num_key_value_heads": 3}, "model.num_kv_heads = 3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "said"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | change))
    with pytest.raises(UserError) as refusal:
        HuggingFaceConfig(tmp_path)
    assert said in str(refusal.value)
    assert "remedy: " in str(refusal.value)


def test_a_window_that_hides_nothing_is_none(tmp_path: Path) -> None:
    content = SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": 128}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert HuggingFaceConfig(tmp_path).max_length == 128


def test_known_families_and_fields_are_those_of_transformers() -> None:
    """A family's name is the class of transformers, and the configurations of the families that are
    supported have no field that would be called unknown."""
    import transformers

    from tools.huggingface.config import MODEL_TYPES
    from tools.huggingface.families import LACKS, fields_of_others

    assert [name for name in LACKS if not hasattr(transformers, name)] == []
    for kind in MODEL_TYPES.values():
        assert fields_of_others(transformers.AutoConfig.for_model(kind).to_diff_dict()) == []
