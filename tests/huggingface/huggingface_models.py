"""Small models of transformers with random weights, in Hugging Face folders; and our checkpoints,
written whole, loaded whole, and continued without a cache."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.config import ModelConfig
from model.router import bias_name, routers_of
from model.transformer import Batch, Transformer
from parallel.axes import MeshSizes
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from tests.data_samples import tokenizer
from tests.runs import same_tensors
from tools.huggingface.checkpoint_reader import DTYPES, CheckpointReader
from tools.huggingface.config import HuggingFaceConfig, parameters
from tools.huggingface.new_folder import FILE_BYTES, write_weights

VOCAB = tokenizer().vocab_size
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": VOCAB,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-5}  # fmt: skip
# With these values, the 64 positions compared have frequencies of all three kinds: kept, slowed and
# interpolated.
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
SPARSE = SMALL | {"intermediate_size": 48, "num_experts_per_tok": 2}
del SPARSE["rms_norm_eps"]  # so it is their default, which for Qwen3-MoE is not ours


class RoundTrip(NamedTuple):
    family: str  # the class of transformers
    config: dict[str, Any]
    file_size: str
    dtype: torch.dtype
    control: dict[str, Any]  # a change of our model that must change its logits
    layout: dict[str, int]  # of the run in the round trip
    world: int = 2

    @property
    def has_experts(self) -> bool:
        return "num_experts_per_tok" in self.config


CASES = {
    "Llama 3.2: scaled rope, tied": RoundTrip(
        "Llama",
        SMALL | {"rope_theta": 500_000.0, "rope_scaling": SCALED, "tie_word_embeddings": True,
                 "head_dim": 16},
        "1GB", torch.float32, {"rope_scaling_factor": 1.0}, {"pp": 2},
    ),
    "Mistral, another width of attention": RoundTrip(
        "Mistral", SMALL | {"rope_theta": 10_000.0, "head_dim": 8, "sliding_window": None},
        "100KB", torch.bfloat16, {"norm_eps": 1e-2}, {"tp": 2},
    ),
    "Qwen3, padded vocabulary": RoundTrip(
        "Qwen3", SMALL | {"rope_theta": 1e6, "head_dim": 32, "vocab_size": VOCAB + 64,
                          "tie_word_embeddings": True},
        "1GB", torch.bfloat16, {"rope_theta": 10_000.0}, {"dp_shard": 2},
    ),
    "Mixtral": RoundTrip(
        "Mixtral", SPARSE | {"num_local_experts": 8, "head_dim": 16}, "150KB", torch.float32,
        {"router": "softmax"}, {"ep": 2, "pp": 2}, 4,
    ),
    "Qwen3-MoE, a dense layer": RoundTrip(  # 8 shards of 4 experts: each is cut
        "Qwen3Moe",
        SPARSE | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16,
                  "mlp_only_layers": [0], "norm_topk_prob": True, "tie_word_embeddings": True},
        "150KB", torch.bfloat16, {"experts": {"per_token": 1}}, {"tp": 2}, 8,
    ),
    "Qwen3-MoE, weights below 1, every second layer": RoundTrip(
        "Qwen3Moe",
        SPARSE | {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 32,
                  "decoder_sparse_step": 2, "norm_topk_prob": False, "num_experts_per_tok": 3},
        "150KB", torch.float32, {"router": "softmax_renormalised"}, {"ep": 4, "tp": 2}, 8,
    ),
}  # fmt: skip


def write_theirs(trip: RoundTrip, folder: Path) -> Path:
    """The folder of a model of transformers with random weights."""
    import transformers

    # a copy: transformers adds rope_theta to rope_scaling
    config = getattr(transformers, f"{trip.family}Config")(**deepcopy(trip.config))
    model = getattr(transformers, f"{trip.family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        mean, std = (1.0, 0.2) if parameter.ndim == 1 else (0.0, 0.15 if trip.has_experts else 0.1)
        parameter.data.normal_(mean, std, generator=generator)
    model.to(trip.dtype).save_pretrained(folder, max_shard_size=trip.file_size)
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the files of a Hugging Face folder."""
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return same_tensors(one, other) and all(one[n].dtype == other[n].dtype for n in one)


def change(folder: Path, file: str, **fields: Any) -> None:
    """Set fields of a JSON file, which need not be there."""
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


def random_folder(folder: Path, architecture: str, **config: Any) -> dict[str, Tensor]:
    """Write a folder in the format of transformers 4, without its tensors; return them."""
    stated = {"architectures": [architecture], "torch_dtype": "float32"}
    change(folder, "config.json", **stated, **config)
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    generator = torch.Generator().manual_seed(2)
    wanted = parameters(HuggingFaceConfig(folder).model)
    return {p.theirs: torch.randn(p.shape, generator=generator) for p in wanted}


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], trainer: dict[str, Any]) -> Path:
    """A complete checkpoint, of one file of whole tensors."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    stored = {name: (codes[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    files = {"tokenizer.model": tokenizer().model}
    write_weights(folder, stored, tensors.__getitem__, files, trainer, FILE_BYTES, "writing")
    return folder


@torch.no_grad()
def load_whole(
    checkpoint: Path, dtype: torch.dtype, changes: dict[str, Any] | None = None, bias: bool = True
) -> Transformer:
    """The model of a checkpoint as training builds it, on one rank, with `changes` of its
    configuration; without `bias`, the biases of its routers are zero."""
    reader = CheckpointReader(checkpoint)
    saved: dict[str, Any] = reader.trainer.model
    within = {key: saved.get(key, {}) | own for key, own in (changes or {}).items()
              if isinstance(own, dict)}  # fmt: skip
    config = ModelConfig(**(saved | (changes or {}) | within))
    mesh = build_mesh(MeshSizes(), "cpu", config.has_experts)
    tp, ep = TensorParallel.of(mesh, sequence_parallel=False), ExpertParallel.of(mesh)
    model = Transformer(config, range(config.num_layers), True, True, tp, ep=ep)
    model.to(dtype).to_empty(device="cpu")
    for weight in weights_of(model):
        weight.sharded.to_local().copy_(reader.weight(weight.global_name))
    for layer, router in routers_of(model):
        if router.has_bias and bias:
            router.set_bias(reader.weight(bias_name(layer)))
    return model


@torch.no_grad()
def recompute(model: Transformer, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Greedy tokens without a cache, by recomputing the whole sequence for each token; and the
    logits [count, V] that they were taken from."""
    tokens, logits = list(prompt), list[Tensor]()
    for _ in range(count):
        positions = torch.arange(len(tokens)).unsqueeze(1)
        logits.append(model(None, Batch(torch.tensor([tokens]).T, None, positions))[-1, 0])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(logits)
