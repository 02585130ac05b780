"""Loads a trained model, whole or sharded over all processes, from a checkpoint of any layout or an
exported folder.

Each rank reads only its shard of every tensor, and converts it to the computation dtype. A
checkpoint's files are compared with their checksums first, each by one rank. An exported folder has
no checksums; its headers are checked.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from costs.parameters import check_tp
from data.tokenizer import Tokenizer
from errors import UserError
from model.config import ModelConfig
from model.experts import Experts
from model.kernels.backend import check_kernels
from model.router import bias_name, routers_of
from model.transformer import Transformer
from parallel.axes import MeshSizes
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from parallel.parameter import weights_of
from parallel.placement import local_region
from runtime.agreement import from_rank_0, on_all_ranks
from runtime.checkpoint.load import require_good
from runtime.exit import refuse
from runtime.start.init import init_distributed
from tools.huggingface.agreement import generation_config, tokens_of
from tools.huggingface.checkpoint_reader import CheckpointReader, WeightReader, newest
from tools.huggingface.config import CONFIG, refuse_foreign
from tools.huggingface.folder_reader import FolderReader


def on_ranks(work: Callable[[str], None]) -> None:
    """Runs a command's work, given the device, as one of the ranks that torchrun has started, or as
    the only one. A UserError, the same on all ranks, ends them with status 2."""
    device = init_distributed()
    try:
        work(device)
    except UserError as error:
        refuse(error)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer."""

    model: Transformer
    tokenizer: Tokenizer
    stop: frozenset[int]  # tokens that end a text
    max_length: int  # of the sequences that it was trained on, or is meant for

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a text that begins a document. Raises UserError if there are none."""
        first = [self.tokenizer.bos_id] if self.tokenizer.adds_bos else []
        tokens = first + self.tokenizer.encode(prompt)
        if not tokens:
            why = "it has no tokens, and no bos is put before it"
            raise UserError("--prompt", prompt, why, "give some text")
        return tokens


def load_model(folder: Path, dtype: torch.dtype, device: str) -> Loaded:
    """Loads the model with tensor parallelism over all ranks, all of which call this function.
    Raises AgreedError if `folder` has no loadable model."""
    folder = from_rank_0(lambda: find(folder))
    is_exported = from_rank_0(lambda: (folder / CONFIG).is_file())
    if not is_exported:
        require_good(folder, "--checkpoint")

    def open_all() -> tuple[WeightReader, Tokenizer, dict[str, Any]]:
        source: WeightReader
        check_kernels("auto", device)
        if is_exported:
            source = FolderReader(folder, "--checkpoint")
        else:
            source = CheckpointReader(folder, verified=True)
            source.check_model()
        check_split(source.model, dist.get_world_size())
        tokenizer = Tokenizer.load(folder, "--checkpoint", check_ids=is_exported)
        num_rows = source.model.vocab_size
        return source, tokenizer, generation_config(folder, tokenizer, num_rows, "--checkpoint")

    source, tokenizer, generation = on_all_ranks(open_all)
    # the machine may differ from the one that trained it
    model = empty_model(replace(source.model, kernels="auto"), dtype, device)
    held = weights_of(model)
    weights = {weight.name: weight.sharded for weight in held if not weight.is_copy}
    for name, weight in weights.items():
        weight.to_local().copy_(source.region(name, local_region(weight)))
    for at, router in routers_of(model):
        if router.has_bias:
            router.set_bias(source.weight(bias_name(at)).to(device))
    for copy in filter(lambda weight: weight.is_copy, held):  # the head of tied embeddings
        copy.sharded.to_local().copy_(weights[copy.global_name].to_local())
    stop = frozenset(tokens_of(generation["eos_token_id"]))
    return Loaded(model, tokenizer, stop, source.max_length)


def find(folder: Path) -> Path:
    """`folder` if it is in Hugging Face format, else the checkpoint that it is or contains."""
    if (folder / CONFIG).is_file():
        return folder
    refuse_foreign(folder, "--checkpoint")
    return newest(folder)


def check_split(model: ModelConfig, tp: int) -> None:
    """Raises UserError if the model cannot be sharded over `tp` ranks."""
    experts = (model.find(Experts) or Experts()).count

    def fits(tp: int) -> bool:
        with suppress(UserError):
            check_tp(model, tp)
            return experts % tp == 0
        return False

    if not fits(tp):
        why = "its heads or experts cannot be split evenly over this many processes"
        remedy = f"choose one of {[n for n in range(1, 65) if fits(n)]}"
        raise UserError("--nproc-per-node", tp, why, remedy)


def empty_model(config: ModelConfig, dtype: torch.dtype, device: str) -> Transformer:
    """The model in one stage, sharded over all ranks, with uninitialized weights."""
    mesh = build_mesh(MeshSizes(tp=dist.get_world_size()), device)
    layers = range(config.num_layers)
    tp = TensorParallel.of(mesh, sequence_parallel=False)
    ep = ExpertParallel(**vars(mesh.tp), dispatch="expert_sum")  # X/tp experts on each rank
    model = Transformer(config, layers, True, True, tp, ep=ep).to(dtype)
    return model.to_empty(device=device).requires_grad_(False)
