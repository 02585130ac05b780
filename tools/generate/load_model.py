"""Loads a trained model, whole or sharded over all processes, from a checkpoint of any layout or an
exported folder.

Each rank reads only its shard of every tensor, and converts it to the computation dtype. A
checkpoint's files are compared with their checksums first, each by one rank. An exported folder has
no checksums; its headers are checked.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from data.tokenizer import Tokenizer
from errors import UserError
from model.config import ModelConfig
from model.feed_forward import experts
from model.router import bias_name, routers_of
from model.transformer import Transformer, check_tp
from parallel.axes import MeshSizes
from parallel.expert import ExpertParallel
from parallel.expert_sum import ExpertSum
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from parallel.placement import local_region
from runtime.checkpoints.checkpoint import require_good
from runtime.checkpoints.trainer_state import read_trainer
from runtime.messages import from_rank_0, on_all_ranks
from tools.huggingface.agreement import ends, generation_config
from tools.huggingface.checkpoint_reader import CheckpointReader, newest
from tools.huggingface.config import (
    CONFIG,
    HuggingFaceConfig,
    option_named,
    parameters,
    refuse_foreign,
)
from tools.huggingface.tensor_files import FolderTensors, check_tensors


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer."""

    model: Transformer
    tokenizer: Tokenizer
    stop: frozenset[int]  # tokens that end a text

    def encode(self, prompt: str, bos: bool | None = None) -> list[int]:
        """The tokens of a text that begins a document. Raises UserError if there are none, or if
        one is not in the model's vocabulary.

        bos: whether the first token is bos; None: as in the tokenizer's configuration.
        """
        if bos and self.tokenizer.bos_id < 0:
            why = "this tokenizer has no token that begins a document"
            raise UserError("--bos", True, why, "leave it out")
        first = [self.tokenizer.bos_id] if (self.tokenizer.adds_bos if bos is None else bos) else []
        tokens = first + self.tokenizer.encode(prompt)
        vocab_size = self.model.config.vocab_size
        if not tokens:
            why = "it has no tokens, and no bos is put before it"
            raise UserError("--prompt", prompt, why, "give some text, or --bos")
        if max(tokens) >= vocab_size:
            why = f"it has the token {max(tokens)}, and the model's vocabulary has {vocab_size}"
            remedy = "put the tokenizer with which the model was trained into its folder"
            raise UserError("--prompt", prompt, why, remedy)
        return tokens


class Source(NamedTuple):
    """A folder with weights, and the model they belong to."""

    folder: Path
    is_checkpoint: bool  # else a folder in Hugging Face format
    config: ModelConfig


def load_model(folder: Path, dtype: torch.dtype, device: str) -> Loaded:
    """Loads the model with tensor parallelism over all ranks, all of which call this function.
    Raises AgreedError if `folder` has no loadable model."""
    source = from_rank_0(lambda: find(folder, dist.get_world_size()), device)
    if source.is_checkpoint:
        require_good(source.folder, "--checkpoint", device)
    tokenizer = on_all_ranks(lambda: Tokenizer.load(source.folder), device)
    generation = on_all_ranks(lambda: generation_of(source, tokenizer), device)
    model = empty_model(source.config, dtype, device)
    held = weights_of(model)
    weights = {weight.name: weight.sharded for weight in held if not weight.is_copy}
    read = read_checkpoint if source.is_checkpoint else read_exported
    routers = routers_of(model)
    biases = {bias_name(at): router.bias for at, router in routers if router.bias is not None}
    on_all_ranks(lambda: read(source, weights, biases), device)
    for copy in filter(lambda weight: weight.is_copy, held):  # the head of tied embeddings
        copy.sharded.to_local().copy_(weights[copy.global_name].to_local())
    return Loaded(model, tokenizer, frozenset(ends(generation)))


def find(folder: Path, tp: int) -> Source:
    """Identifies the content of `folder`. Raises UserError if it is not a model that can be sharded
    over `tp` ranks."""
    if (folder / CONFIG).is_file():
        with option_named():
            source = Source(folder, False, HuggingFaceConfig(folder).model)
    else:
        refuse_foreign(folder, "--checkpoint")
        path = newest(folder)
        source = Source(path, True, read_trainer(path, "--checkpoint").model_config_saved)
    # the machine may differ from the one that trained it
    config = replace(source.config, kernels="auto")
    if not fits(config, tp):
        what = f"{config.num_heads} query and {config.num_kv_heads} key/value heads"
        if config.num_experts % tp:
            what = f"{config.num_experts} experts"
        why = f"its {what} cannot be split evenly over this many processes"
        remedy = f"choose one of {[n for n in range(1, 65) if fits(config, n)]}"
        raise UserError("--nproc-per-node", tp, why, remedy)
    return source._replace(config=config)


def generation_of(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    with option_named():
        return generation_config(source.folder, tokenizer, source.config.vocab_size)


def fits(config: ModelConfig, tp: int) -> bool:
    """Whether the model can be sharded over `tp` ranks."""
    try:
        check_tp(config, tp)
    except UserError:
        return False
    return config.num_experts % tp == 0


def empty_model(config: ModelConfig, dtype: torch.dtype, device: str) -> Transformer:
    """The model in one stage, sharded over all ranks, with uninitialized weights."""
    mesh = build_mesh(MeshSizes(tp=dist.get_world_size()), device)
    layers = range(config.num_layers)
    tp = TensorParallel.of(mesh.tp, sequence_parallel=False)
    ep = ExpertParallel(tp.size, tp.rank, tp.mesh, tp.group)  # X/tp experts on each rank
    model = Transformer(config, layers, True, True, tp, ep=ep).to(dtype)
    for layer in model.modules():
        if isinstance(layer, experts.FeedForward):
            layer.dispatch, layer.router.ep = ExpertSum(ep), ExpertParallel()
    for _, router in routers_of(model):
        if router.has_bias:
            router.bias = torch.zeros(router.num_experts, device=device)
    return model.to_empty(device=device).requires_grad_(False)


def read_checkpoint(source: Source, weights: dict[str, DTensor], biases: dict[str, Tensor]) -> None:
    """Fills this rank's shard of every weight, and the biases of routers, from a checkpoint of any
    layout."""
    reader = CheckpointReader(source.folder)
    reader.require({name: tuple(found.shape) for name, found in (weights | biases).items()})
    for name, weight in weights.items():
        weight.to_local().copy_(reader.region(name, local_region(weight)))
    for name, bias in biases.items():
        bias.copy_(reader.weight(name))


def read_exported(source: Source, weights: dict[str, DTensor], biases: dict[str, Tensor]) -> None:
    """Fills this rank's shard of every weight from safetensors files of whole tensors. They are
    memory-mapped, so other ranks' shards are not read. No such model has `biases`."""
    assert not biases
    with option_named():
        files = FolderTensors(source.folder)
        check_tensors(source.folder, source.config, files)
    for wanted in parameters(source.config):
        region, local = local_region(weights[wanted.ours]), weights[wanted.ours].to_local()
        if wanted.expert is not None:
            mine, *region = region
            if wanted.expert not in mine:
                continue
            local = local[wanted.expert - mine.start]
        of_file = tuple(slice(part.start, part.stop) for part in region)
        local.copy_(files.tensor(wanted.theirs)[of_file])
