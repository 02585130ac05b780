"""tools/generate for mixtures of experts: with the cache, over any tp, it continues a text with the
tokens that a forward of the whole text gives, of a checkpoint and of an exported folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from errors import UserError
from model.config import ModelConfig
from model.router import bias_name, routers_of
from model.transformer import Transformer
from parallel.layer import TensorParallel
from parallel.parameter import weights_of
from proofs.ranks import Ranks
from runtime.checkpoint.manifest import Manifest, fingerprint, read_manifest, write_manifest
from runtime.trainer_state import model_entries
from tests.data_samples import tokenizer
from tests.huggingface.huggingface_models import change, load_whole, recompute, write_checkpoint
from tests.runs import said_by
from tools.export import export
from tools.generate.load_model import check_split, load_model
from tools.generate.loop import Sampling, generate

PROMPTS = [[5, 17, 300, 41, 8], [7, 99]]
COUNT = 8
SMALL = {"dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48,
         "vocab_size": tokenizer().vocab_size, "feed_forward": "experts",
         "experts": {"ffn_dim": 24, "count": 4, "per_token": 2}}  # fmt: skip
OF_EXPERTS = SMALL["experts"]
MODELS: dict[str, dict[str, Any]] = {
    "renormalised": SMALL | {"qk_norm": True, "experts": OF_EXPERTS | {"num_dense_layers": 1}},
    "softmax, every second layer": SMALL | {"router": "softmax",
                                            "experts": OF_EXPERTS | {"count": 6},
                                            "feed_forward": ["swiglu", "experts"]},
    "bias, shared, scaled": SMALL | {
        "router": "sigmoid_bias",
        "experts": OF_EXPERTS | {"num_shared": 1, "router_scale": 2.5}},
}  # fmt: skip


def random_checkpoint(folder: Path, name: str) -> Path:
    """A checkpoint with large random weights, in float64 but exact in the float32 of an export, and
    biases that decide choices."""
    config = ModelConfig(**MODELS[name])
    model = Transformer(config, range(config.num_layers), True, True, TensorParallel())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for weight in weights_of(model):
        whole = torch.randn(weight.spec.shape, generator=generator)
        whole = 1 + 0.2 * whole if whole.ndim == 1 else 0.25 * whole
        tensors[weight.name] = whole.double()
    for layer, router in routers_of(model):
        if router.has_bias:
            tensors[bias_name(layer)] = torch.randn(config.experts.count, generator=generator)
    data = {"checksum": "none", "next_sample": 0, "skipped": []}
    trainer = {"seed": 0, "seq_len": 64, "model": model_entries(config), "data": data}
    return write_checkpoint(folder, tensors, trainer)


def generated(folder: Path) -> list[list[int]]:
    """The tokens that follow each prompt, with the cache."""
    model, greedy = load_model(folder, torch.float64, "cpu").model, Sampling(temperature=0)
    return [list(generate(model, prompt, COUNT, greedy)) for prompt in PROMPTS]


def by_whole_forwards(folder: Path, bias: bool = True) -> list[list[int]]:
    """The same, each token from a forward of all tokens before it, with the dispatch of training
    on one rank."""
    model = load_whole(folder, torch.float64, bias=bias)
    return [recompute(model, prompt, COUNT)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_whole_forwards(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Of a checkpoint and of its export, of whose files each rank reads its experts."""
    folder = random_checkpoint(tmp_path / "saved", name)
    expected = ranks.run(by_whole_forwards, 1, folder)[0]
    assert len({token for row in expected for token in row}) > 5, "tokens worth comparing"
    assert ranks.run(generated, 2, folder) == [expected] * 2
    if "bias" in name:  # control
        assert ranks.run(by_whole_forwards, 1, folder, False)[0] != expected
    if name == "renormalised":
        export(folder, tmp_path / "exported", file_bytes=20_000)
        assert ranks.run(generated, 2, tmp_path / "exported") == [expected] * 2


def test_what_cannot_be_loaded_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "saved", "softmax, every second layer")
    config = ModelConfig(**MODELS["softmax, every second layer"])
    for tp in (4, 3):  # of 6 experts, and of 4 query and 2 key/value heads
        said = rf"(?s)--nproc-per-node = {tp}: its heads or experts .* choose one of \[1, 2\]"
        with pytest.raises(UserError, match=said):
            check_split(config, tp)
    for message in ranks.run(said_by, 4, load_model, folder, torch.float32, "cpu"):
        assert "its heads or experts cannot be split" in message
    model = json.loads((folder / "trainer.json").read_text())["model"]
    change(folder, "trainer.json", model=model | {"ffn_dim": 64})
    manifest = read_manifest(folder)
    files = {name: fingerprint(folder / name) for name in manifest.files}
    write_manifest(folder, Manifest(files=files, tensors=manifest.tensors))
    (message,) = ranks.run(said_by, 1, load_model, folder, torch.float32, "cpu")
    assert "its tensors do not match the model in its trainer.json" in message
