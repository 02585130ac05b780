"""Mixtures of experts from and to Hugging Face folders: our model has the logits of transformers',
chooses the same experts, and tensors survive a round trip bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.router import routers_of
from model.transformer import Batch, Transformer
from parallel.axes import MeshSizes
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from runtime.manifest import verify
from tests.runs import train_run, write_config
from tests.test_huggingface import VOCAB, same_bits, save, stored
from tools import export, import_hf
from tools.huggingface.checkpoint_reader import CheckpointReader, newest
from tools.huggingface.config import HuggingFaceConfig
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


@pytest.mark.parametrize("case", CASES)
def test_round_trip(
    ranks: Ranks, data: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imported model has the logits of transformers' in float64 and chooses the same experts.
    Exported again, directly or after a run over ep with a learning rate of zero, it has the same
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
        "parallel": {"ep": 2, "tp": 2},
        "train": {"steps": 1},
        "optimizer": {"lr": 0.0, "warmup_steps": 0},
        "checkpoint": {"interval": 1, "load_weights_only": str(checkpoint)},
    }
    assert ranks.run(train_run, 4, [write_config(tmp_path, data, **sections)]) == [""] * 4
    dtype = "bfloat16" if CASES[case][2] == torch.bfloat16 else "float32"
    for name, saved in (("straight", checkpoint), ("trained", newest(tmp_path / "run"))):
        out = tmp_path / name
        export.export(saved, out, dtype, file_bytes=100_000)
        assert same_bits(stored(out), stored(hf)), name
        again, _ = their_logits(out, tokens, monkeypatch)
        assert torch.equal(again, theirs)
