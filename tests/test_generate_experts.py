"""tools/generate for mixtures of experts: with the cache, over any tp, it continues a text with the
tokens that a forward of the whole text gives, of a checkpoint of any layout and of an exported
folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from errors import UserError
from model.config import ModelConfig
from model.router import routers_of
from model.transformer import Batch, Transformer
from parallel.axes import MeshSizes
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from runtime.checkpoints.manifest import PLACES, Manifest, fingerprint, write_manifest
from runtime.checkpoints.trainer_state import model_entries
from tests.counting import Listener
from tests.data_samples import tokenizer
from tests.huggingface_models import stored
from tests.runs import run, write_config
from tools import verify as verify_command
from tools.export import export
from tools.generate.load_model import load_model
from tools.generate.loop import generate
from tools.generate.sampling import Sampling
from tools.huggingface.checkpoint_reader import CheckpointReader, newest
from tools.ranks import Ranks

PROMPTS = [[5, 17, 300, 41, 8], [7, 99]]
COUNT = 8
SMALL = {"dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48,
         "vocab_size": tokenizer().vocab_size, "feed_forward": "experts", "expert_ffn_dim": 24,
         "num_experts": 4, "experts_per_token": 2}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "renormalised": SMALL | {"qk_norm": True, "num_dense_layers": 1},
    "softmax, every second layer": SMALL | {"router": "softmax", "num_experts": 6,
                                            "feed_forward": ["swiglu", "experts"]},
    "bias, shared, scaled": SMALL | {"router": "sigmoid_bias", "num_shared_experts": 1,
                                     "router_scale": 2.5},
}  # fmt: skip


def write_checkpoint(folder: Path, sizes: dict[str, Any]) -> Path:
    """A checkpoint with large random weights, in float64, and biases that decide choices."""
    folder.mkdir()
    config = ModelConfig(**sizes)
    model = Transformer(config, range(config.num_layers), True, True, TensorParallel())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for weight in weights_of(model):
        whole = torch.randn(weight.spec.shape, generator=generator, dtype=torch.float64)
        whole = 1 + 0.2 * whole if whole.ndim == 1 else 0.25 * whole
        tensors[f"model.{weight.name}"] = whole
    for layer, router in routers_of(model):
        if router.has_bias:
            bias = torch.randn(config.num_experts, generator=generator)
            tensors[f"model.blocks.{layer}.feed_forward.router.bias"] = bias
    places = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={PLACES: json.dumps(places)})
    data = {"checksum": "none", "next_sample": 0, "skipped": []}
    zeros = dict.fromkeys(("step", "updates", "tokens", "seed", "bad_in_a_row"), 0)
    trainer = {"seq_len": 64, "recent_losses": [], "model": model_entries(config), "data": data}
    (folder / "trainer.json").write_text(json.dumps(zeros | trainer))
    (folder / "tokenizer.model").write_bytes(tokenizer().model)
    files = {path.name: fingerprint(path) for path in folder.iterdir()}
    names = {torch.float64: "F64", torch.float32: "F32"}
    held = {name: (names[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    write_manifest(folder, Manifest(files, held))
    return folder


def generated(folder: Path) -> list[list[int]]:
    """The tokens that follow each prompt: from the padded batch, with the cache."""
    loaded = load_model(folder, torch.float64, "cpu")
    new = list(generate(loaded.model, PROMPTS, COUNT, Sampling(temperature=0)))
    return [[row[i] for row in new] for i in range(len(PROMPTS))]


def by_whole_forwards(folder: Path, has_bias: bool = True) -> list[list[int]]:
    """The same, each token from a forward of all tokens before it, with the dispatch of training
    on one rank."""
    reader = CheckpointReader(folder)
    config, mesh = reader.model, build_mesh(MeshSizes(), "cpu", has_experts=True)
    tp, ep = TensorParallel.of(mesh.tp, sequence_parallel=False), ExpertParallel.of(mesh)
    whole = Transformer(config, range(config.num_layers), True, True, tp, ep=ep)
    model = whole.to(torch.float64).to_empty(device="cpu")
    rows = []
    with torch.no_grad():
        for weight in weights_of(model):
            weight.sharded.to_local().copy_(reader.weight(weight.global_name))
        for layer, router in routers_of(model):
            if router.has_bias and has_bias:
                router.bias = reader.weight(f"blocks.{layer}.feed_forward.router.bias")
        for prompt in PROMPTS:
            row = list(prompt)
            for _ in range(COUNT):
                positions = torch.arange(len(row)).unsqueeze(1)
                logits = model(None, Batch(torch.tensor([row]).T, None, positions))
                row.append(int(logits[-1, 0].argmax()))
            rows.append(row[len(prompt) :])
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_whole_forwards(ranks: Ranks, tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "saved", MODELS[name])
    expected = ranks.run(by_whole_forwards, 1, folder)[0]
    assert len({token for row in expected for token in row}) > 5, "tokens worth comparing"
    for tp in (1, 2):
        assert ranks.run(generated, tp, folder) == [expected] * tp
    if "bias" in name:  # control
        assert ranks.run(by_whole_forwards, 1, folder, False)[0] != expected


def test_an_exported_folder_gives_the_same_tokens(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank takes its experts out of the files of single experts."""
    folder = write_checkpoint(tmp_path / "saved", MODELS["renormalised"])
    export(folder, tmp_path / "exported", file_bytes=20_000)
    for tp in (1, 2):
        found = ranks.run(generated, tp, tmp_path / "exported")
        assert found == [found[0]] * tp == ranks.run(rounded, 1, folder) * tp


def rounded(folder: Path) -> list[list[int]]:
    """`generated`, with weights in the float32 of the export."""
    loaded = load_model(folder, torch.float64, "cpu")
    for weight in weights_of(loaded.model):
        local = weight.sharded.to_local()
        local.copy_(local.float().double())
    new = list(generate(loaded.model, PROMPTS, COUNT, Sampling(temperature=0)))
    return [[row[i] for row in new] for i in range(len(PROMPTS))]


def refused(folder: Path) -> str:
    try:
        load_model(folder, torch.float32, "cpu")
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_divide_the_experts_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "saved", MODELS["softmax, every second layer"])
    messages = ranks.run(refused, 4, folder)
    assert messages == [messages[0]] * 4
    assert "--nproc-per-node = 4: its 6 experts cannot be split evenly" in messages[0]
    assert "choose one of [1, 2]" in messages[0]


def test_a_layer_sends_one_sum_of_results(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank holds X/tp experts, and the only collective of a layer is the sum of T·D
    numbers."""
    folder = write_checkpoint(tmp_path / "saved", MODELS["renormalised"])
    for tp in (1, 4):
        sums = {"all_reduce": (1, 3 * 2 * 32 * 8)} if tp > 1 else {}
        assert ranks.run(sent_by_a_layer, tp, folder) == [(4 // tp, sums)] * tp


def sent_by_a_layer(folder: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """The number of experts on this rank, and collectives: kind → (number, bytes)."""
    layer = load_model(folder, torch.float64, "cpu").model.blocks["2"].feed_forward
    mesh = build_mesh(MeshSizes(tp=torch.distributed.get_world_size()), "cpu")
    x = torch.randn(3, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Listener(mesh) as listener:
        layer(x)
    return len(layer.experts.gate.local_weight()), listener.count()


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (4, {"pp": 2, "ep": 2}),
        # 8 shards of 4 experts: each is cut
        pytest.param(8, {"tp": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_checkpoint_of_any_layout(
    ranks: Ranks, data: Path, tmp_path: Path, world: int, layout: dict[str, int]
) -> None:
    """A checkpoint that several ranks saved is good, gives the same tokens over any tp, and every
    expert of its export is that of the tensor of all."""
    model = MODELS["renormalised"] | {"num_layers": 4, "init_std": 0.3}
    sections = {"train": {"steps": 1}, "checkpoint": {"interval": 1}}
    config = write_config(tmp_path, data, model=model, parallel=layout, **sections)
    run(ranks, world, config)
    folder = newest(tmp_path / "run")
    assert verify_command.main([str(folder)]) == 0
    expected = ranks.run(by_whole_forwards, 1, folder)[0]
    for tp in (1, 2):
        assert ranks.run(generated, tp, folder) == [expected] * tp
    export(folder, tmp_path / "exported")
    exported, reader = stored(tmp_path / "exported"), CheckpointReader(folder)
    for ours in (name for name in reader.weights() if "experts" in name):
        _, layer, _, _, name, _ = ours.split(".")
        for expert, one in enumerate(reader.weight(ours)):
            theirs = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
            assert torch.equal(exported[theirs], one)
