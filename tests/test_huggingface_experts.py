"""Mixtures of experts from and to Hugging Face folders: our model has the logits of transformers',
chooses the same experts, and tensors survive a round trip bit for bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from errors import UserError
from model.config import ModelConfig
from model.router import routers_of
from model.transformer import Batch, Transformer, num_parameters
from parallel.axes import MeshSizes
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from runtime.checkpoints.manifest import verify
from tests.data_samples import tokenizer
from tests.huggingface_models import VOCAB, same_bits, save, stored
from tests.runs import train_run, write_config
from tools import export, import_hf
from tools.huggingface.checkpoint_reader import CheckpointReader, newest
from tools.huggingface.config import HuggingFaceConfig, config_json, parameters
from tools.ranks import Ranks

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": VOCAB,
         "max_position_embeddings": 128, "num_experts_per_tok": 2}  # fmt: skip
# case → (class of transformers, its configuration in addition to SIZES, dtype of its weights)
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "Mixtral": ("Mixtral", {"num_local_experts": 8, "head_dim": 16}, torch.float32),
    "Qwen3-MoE, a dense layer": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "mlp_only_layers": [0],
         "norm_topk_prob": True, "tie_word_embeddings": True},
        torch.bfloat16,
    ),
    "Qwen3-MoE, weights below 1, every second layer": (
        "Qwen3Moe",
        {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 32, "decoder_sparse_step": 2,
         "norm_topk_prob": False, "num_experts_per_tok": 3},
        torch.float32,
    ),
}  # fmt: skip
# Controls: for each case, a change of the model that must change its logits.
CONTROLS = {
    "Mixtral": {"router": "softmax"},
    "Qwen3-MoE, a dense layer": {"experts_per_token": 1},
    "Qwen3-MoE, weights below 1, every second layer": {"router": "softmax_renormalised"},
}


# the layout of a run on 8 ranks; the second shards 4 experts over 8 ranks, so each is cut
LAYOUTS = {
    "Mixtral": {"ep": 2, "tp": 2, "pp": 2},
    "Qwen3-MoE, a dense layer": {"tp": 2},
    "Qwen3-MoE, weights below 1, every second layer": {"ep": 4, "tp": 2},
}


def written_by_transformers(case: str, folder: Path) -> Path:
    """A folder with random weights, in several files."""
    import transformers

    family, changes, dtype = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        mean, std = (1.0, 0.2) if parameter.ndim == 1 else (0.0, 0.15)
        parameter.data.normal_(mean, std, generator=generator)
    return save(model.to(dtype), folder, "150KB")


def their_logits(
    folder: Path, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, S, V] in float64, and the experts [B·S, k] that each layer with experts chooses.

    Their code converts to float32 what should be more exact than bfloat16; that is float64 here.
    """
    from transformers import AutoModelForCausalLM

    chosen: list[Tensor] = []
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda *call: chosen.append(call[2][2]))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]
        return model(tokens).logits, chosen


def our_logits(
    checkpoint: str, tokens: Tensor, changes: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """The same of the checkpoint's weights, on one rank."""
    reader = CheckpointReader(Path(checkpoint))
    config = ModelConfig(**(reader.trainer.model | changes))
    mesh = build_mesh(MeshSizes(), "cpu", has_experts=True)
    tp, ep = TensorParallel.of(mesh.tp, sequence_parallel=False), ExpertParallel.of(mesh)
    whole = Transformer(config, range(config.num_layers), True, True, tp, ep=ep)
    model = whole.to(torch.float64).to_empty(device="cpu")
    chosen: list[Tensor] = []
    for _, router in routers_of(model):
        router.register_forward_hook(lambda *call: chosen.append(call[2][1].chosen))
    positions = torch.arange(tokens.shape[1]).unsqueeze(1)
    with torch.no_grad():
        for weight in weights_of(model):
            weight.sharded.to_local().copy_(reader.weight(weight.global_name))
        logits = model(None, Batch(tokens.T, None, positions)).transpose(0, 1).clone()
    length, rows = tokens.T.shape
    return logits, [c.unflatten(0, (length, rows)).transpose(0, 1).flatten(0, 1) for c in chosen]


@pytest.mark.parametrize(
    "case",
    ["Mixtral", *(pytest.param(case, marks=pytest.mark.thorough) for case in list(CASES)[1:])],
)
def test_round_trip(
    ranks: Ranks, data: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imported model has the logits of transformers' in float64 and chooses the same experts.
    Exported again, directly or after a run on 8 ranks with a learning rate of zero, it has the same
    bits."""
    hf = written_by_transformers(case, tmp_path / "hf")
    assert len(list(hf.glob("*.safetensors"))) > 2
    checkpoint = tmp_path / "imported"
    import_hf.import_hf(hf, checkpoint, file_bytes=100_000)
    assert verify(checkpoint)

    tokens = torch.randint(VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))
    theirs, they_chose = their_logits(hf, tokens, monkeypatch)
    assert theirs.dtype == torch.float64
    ours, we_chose = ranks.run(our_logits, 1, str(checkpoint), tokens, {})[0]
    assert len(we_chose) == len(they_chose) > 0
    for mine, other in zip(we_chose, they_chose, strict=True):
        assert torch.equal(mine.sort(1).values, other.sort(1).values)
        assert len(other.unique()) > 2, "choices worth comparing"
    assert (ours - theirs).abs().max() <= 1e-13 * theirs.abs().max()
    assert theirs.std() > 0.1, "logits worth comparing"
    wrong, _ = ranks.run(our_logits, 1, str(checkpoint), tokens, CONTROLS[case])[0]
    assert (wrong - theirs).abs().max() > 1e-2, "control: a wrong setting must show"

    sections = {
        "model": import_hf.said(HuggingFaceConfig(hf).model),
        "parallel": LAYOUTS[case],
        "train": {"steps": 1},
        "optimizer": {"lr": 0.0, "warmup_steps": 0},
        "checkpoint": {"interval": 1, "load_weights_only": str(checkpoint)},
    }
    assert ranks.run(train_run, 8, [write_config(tmp_path, data, **sections)]) == [""] * 8
    dtype = "bfloat16" if CASES[case][2] == torch.bfloat16 else "float32"
    for name, saved in (("straight", checkpoint), ("trained", newest(tmp_path / "run"))):
        out = tmp_path / name
        export.export(saved, out, dtype, file_bytes=100_000)
        assert same_bits(stored(out), stored(hf)), name
        again, _ = their_logits(out, tokens, monkeypatch)
        assert torch.equal(again, theirs)


# --- configurations -------------------------------------------------------------------------------

# name → (its published config.json, shortened; its parameters)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral 8x7B": (
        {"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
         "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
         "tie_word_embeddings": False, "vocab_size": 32000},
        46_702_792_704,
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


def written(model: ModelConfig) -> dict[str, Any]:
    return config_json(model, dtype="float32", max_length=128)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(tmp_path: Path, name: str) -> None:
    """Published configurations give the right number of parameters, by formula and by the table of
    tensors. The config.json that we write for them says the same and reads back the same."""
    content, count = PUBLISHED[name]
    model = read(tmp_path, content).model
    assert num_parameters(model) == count
    assert sum(torch.Size(p.shape).numel() for p in parameters(model)) == count
    ours = written(model) | {"max_position_embeddings": content["max_position_embeddings"]}
    assert {key: ours.get(key, content[key]) for key in content} == content
    assert read(tmp_path, ours).model == model


def base(case: str) -> dict[str, Any]:
    """The configuration of a case, as a folder has it."""
    family, changes, _ = CASES[case]
    return {"architectures": [f"{family}ForCausalLM"]} | SIZES | changes


DENSE = {
    "none": ([], 1, {"feed_forward": "experts", "num_dense_layers": 0}),
    "the first": ([0, 1], 1, {"feed_forward": "experts", "num_dense_layers": 2}),
    "the first, by the step": ([], 4, {"feed_forward": "experts", "num_dense_layers": 3}),
    "every second": ([], 2, {"feed_forward": ("swiglu", "experts")}),
    "said in both ways": ([3], 2, {"feed_forward": ("swiglu", "experts", "swiglu")}),
    "one in the middle": ([1], 1, {"feed_forward": ("experts", "swiglu", "experts")}),
    "all": ([0, 1, 2, 3], 1, {"feed_forward": "swiglu", "num_experts": 0}),
}


@pytest.mark.parametrize("name", DENSE)
def test_which_layers_are_dense(tmp_path: Path, name: str) -> None:
    """The layers with experts are those that transformers makes, and our config.json names them
    again."""
    dense, step, expected = DENSE[name]
    content = base("Qwen3-MoE, a dense layer")
    content |= {"mlp_only_layers": dense, "decoder_sparse_step": step}
    model = read(tmp_path, content).model
    assert {key: getattr(model, key) for key in expected} == expected
    theirs = [(i + 1) % step == 0 and i not in dense for i in range(4)]
    assert [model.feed_forward_of(i) == "experts" for i in range(4)] == theirs
    assert read(tmp_path, written(model)).model == model


def test_what_older_and_newer_files_leave_out(tmp_path: Path) -> None:
    """Missing keys have the defaults of transformers, and both names of num_experts are read."""
    qwen = base("Qwen3-MoE, a dense layer")
    newer = {"num_local_experts" if key == "num_experts" else key: qwen[key] for key in qwen}
    assert read(tmp_path, newer).model == read(tmp_path, qwen).model
    left_out = {"num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"}
    model = read(tmp_path, {key: qwen[key] for key in qwen.keys() - left_out}).model
    found = model.num_experts, model.experts_per_token, model.router, model.expert_ffn_dim
    assert found == (128, 8, "softmax", 768)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("OLMoE", {"architectures": ["OlmoeForCausalLM"]}, "over all heads together"),
    ("DeepSeek-V2", {"architectures": ["DeepseekV2ForCausalLM"]}, "latent"),
    ("DeepSeek-V3", {"architectures": ["DeepseekV3ForCausalLM"]}, "latent"),
    ("gpt-oss", {"architectures": ["GptOssForCausalLM"]}, "biases"),
    ("Qwen2-MoE", {"architectures": ["Qwen2MoeForCausalLM"]}, "a gate on the shared expert"),
    ("window", {"sliding_window": 64}, "sliding_window = 64"),
    ("no experts", {"num_local_experts": 0}, "model.num_experts = 0"),
    ("too many chosen", {"num_experts_per_tok": 9}, "model.experts_per_token = 9"),
    ("text for a number", {"num_local_experts": "8"}, "num_local_experts = '8'"),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as refusal:
        read(tmp_path, base("Mixtral") | change)
    assert said in str(refusal.value)
    assert "remedy: " in str(refusal.value)


NOT_EXPORTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "bias": ({"router": "sigmoid_bias"}, "model.router", "router=softmax_renormalised"),
    "shared": ({"num_shared_experts": 1}, "model.num_shared_experts", "num_shared_experts=0"),
    "scaled": ({"router_scale": 2.5}, "model.router_scale", "router_scale=1.0"),
    "softmax": ({"router": "softmax", "qk_norm": False}, "model.router", "qk_norm=true"),
    "dense": ({"num_dense_layers": 1, "qk_norm": False}, "model.num_dense_layers", "qk_norm=true"),
    "mixed": ({"feed_forward": ("swiglu", "experts"), "qk_norm": False}, "model.feed_forward",
              "qk_norm=true"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_what_their_models_lack_is_not_exported(tmp_path: Path, name: str) -> None:
    """Control: without the change, the model is exported, and keys of training are free."""
    changes, key, remedy = NOT_EXPORTED[name]
    model = read(tmp_path, base("Qwen3-MoE, a dense layer")).model
    model = dataclasses.replace(model, num_dense_layers=0)
    free = {"router_aux_weight": 0.5, "router_z_weight": 0.5}
    assert parameters(dataclasses.replace(model, **free)) == parameters(model)
    for refuse in (parameters, written):
        with pytest.raises(UserError) as refusal:
            refuse(dataclasses.replace(model, **changes))
        assert refusal.value.key == key
        assert remedy in refusal.value.remedy


def test_experts_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    """Our tensor of all experts has one dtype."""
    model = read(tmp_path, base("Mixtral")).model
    tensors = {p.theirs: torch.zeros(p.shape) for p in parameters(model)}
    name = "model.layers.2.block_sparse_moe.experts.5.w3.weight"
    tensors[name] = tensors[name].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} has another dtype"):
        import_hf.import_hf(tmp_path, tmp_path / "out")


def test_one_expert_is_read_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export reads no tensor of all experts at once, of whatever pieces it consists."""
    model = read(tmp_path, base("Mixtral")).model
    generator = torch.Generator().manual_seed(3)
    tensors = {p.theirs: torch.randn(p.shape, generator=generator) for p in parameters(model)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.model").write_bytes(tokenizer().model)
    import_hf.import_hf(tmp_path, tmp_path / "imported")
    most, original = 0, CheckpointReader.weight

    def watched(self: CheckpointReader, *arguments: Any) -> Tensor:
        nonlocal most
        found = original(self, *arguments)
        most = max(most, found.ndim)
        return found

    monkeypatch.setattr(CheckpointReader, "weight", watched)
    export.export(tmp_path / "imported", tmp_path / "out")
    assert most == 2
    assert same_bits(stored(tmp_path / "out"), tensors)
