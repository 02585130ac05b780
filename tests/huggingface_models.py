"""Small models of transformers with random weights, in Hugging Face folders."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.data_samples import tokenizer

VOCAB = tokenizer().vocab_size
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": VOCAB,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-5}  # fmt: skip
# With these values, the 64 positions compared have frequencies of all three kinds: kept, slowed and
# interpolated.
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# case → (class of transformers, its configuration in addition to SMALL, largest file, dtype)
CASES: dict[str, tuple[str, dict[str, Any], str, torch.dtype]] = {
    "Llama 3, sharded": ("Llama", {"rope_theta": 500_000.0}, "100KB", torch.float32),
    "Llama 3.2: scaled rope, tied": (
        "Llama",
        {"rope_theta": 500_000.0, "rope_scaling": SCALED, "tie_word_embeddings": True,
         "head_dim": 16},
        "1GB",
        torch.float32,
    ),
    "Mistral, another width of attention": (
        "Mistral",
        {"rope_theta": 10_000.0, "head_dim": 8, "sliding_window": None},
        "100KB",
        torch.bfloat16,
    ),
    "Qwen3, padded vocabulary": (
        "Qwen3",
        {"rope_theta": 1e6, "head_dim": 32, "vocab_size": VOCAB + 64, "tie_word_embeddings": True},
        "1GB",
        torch.float32,
    ),
}  # fmt: skip


def make_model(case: str) -> Any:
    """A model of transformers with random weights."""
    import transformers

    family, changes, _, dtype = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(SMALL | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        mean, std = (1.0, 0.2) if parameter.ndim == 1 else (0.0, 0.1)
        parameter.data.normal_(mean, std, generator=generator)
    return model.to(dtype)


def save(model: Any, folder: Path, file_size: str) -> Path:
    model.save_pretrained(folder, max_shard_size=file_size)
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the files of a Hugging Face folder."""
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )
