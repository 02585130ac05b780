"""Which kernels compute attention in a run: its line at the start, and the check that they run.

    attention: cuDNN 9.20.0
    attention: flash 2 (not flash 3: not installed)                      documents, windows, or cp
    attention: cuDNN 9.20.0 in 24 layers, flash 2 (not flash 3: not installed) in 24 layers
    attention: flash (CPU)

The rules are in model/kernels/attention_choice.py.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from costs.parameters import kinds_of_blocks
from errors import UserError
from model.documents import find_documents
from model.kernels.attention_choice import KEY, Call, Choice, choose_for_steps, this_device
from model.positions import BatchPositions
from parallel.context import Attend, ContextParallel, number_of_pieces
from runtime.device import deterministic
from runtime.evaluation.scoring import padded
from settings.checks import cuts_of_sequence
from settings.config import Config


class _Asked:
    """Stands for the positions of a batch (model/positions.py) and notes which masks a layer asks
    for."""

    def __init__(self) -> None:
        self.masks: list[tuple[int | None, int, str]] = []

    def angles(self, *_: Any) -> None: ...

    def mask(self, *asked: Any) -> None:
        self.masks.append(asked)  # (window, head_dim, kernel)


def _asked(config: Config) -> Iterator[tuple[tuple[int | None, int, str], int]]:
    """The masks that layers ask for (window, head_dim, kernel), and the number of layers."""
    for block, layers in kinds_of_blocks(config.model):
        asked = _Asked()
        block.attention.inputs(asked)
        for mask in asked.masks:
            yield mask, layers


def choices(config: Config, device_type: str) -> Counter[tuple[Call, Choice]]:
    """The calls of attention in a step on this machine's "cpu" or "cuda", each with the kernel that
    is chosen for it, and the number of layers. With cp, they are those of chunks that do not begin
    a sequence. Raises UserError if the wanted kernel cannot run."""
    train, found = config.train, Counter[tuple[Call, Choice]]()
    dtype = config.precision.compute
    for (window, head_dim, wanted), layers in _asked(config):
        packed = config.data.document_mask or (window or train.seq_len) < train.seq_len
        packed |= config.parallel.cp > 1  # a chunk of queries, and more keys (mask.py)
        call = Call(dtype, head_dim, train.seq_len, packed, train.deterministic)
        found[call, choose_for_steps(this_device(device_type), call, wanted)] += layers
    return found


def describe_attention(config: Config, device_type: str) -> str:
    """The line that a run logs at its start."""
    layers = Counter[str]()
    for (_, choice), count in choices(config, device_type).items():
        layers[str(choice)] += count
    if not layers:  # a kind of attention that asks for no mask
        return "attention: of its own kind"
    if len(layers) == 1:
        return f"attention: {next(iter(layers))}"
    return "attention: " + ", ".join(f"{text} in {n} layers" for text, n in layers.items())


def check_attention(config: Config, device_type: str) -> None:
    """Choose the kernels; on a GPU, also make this rank's calls of them once. Raises UserError if
    the wanted kernel cannot run, or a kernel fails: a later failure would be inside the model, in
    the first step, evaluation or examination."""
    choices(config, device_type)
    if device_type != "cuda":
        return
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    cp = ContextParallel(sizes.cp, sizes.coordinates(dist.get_rank())["cp"])
    try:
        make_calls(config, device_type, cp)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise  # another process may hold the memory, so a restart may help
    except RuntimeError as error:
        why = f"a kernel fails on this machine: {str(error).partition(chr(10))[0]} "
        why += f"({describe_attention(config, device_type)})"
        remedy = "choose another one, for example flash2"
        raise UserError(KEY, config.model.attention_kernel, why, remedy) from error
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def make_calls(config: Config, device: str, cp: ContextParallel) -> None:
    """Make each call of attention that a layer makes on a rank of `cp`, forward and backward."""
    model, tp = config.model, config.parallel.tp
    heads, shared = model.num_heads // tp, max(model.num_kv_heads // tp, 1)
    dtype = config.precision.compute
    for length, has_documents, repeats in _batches(config):
        rows = config.train.micro_batch_size * config.train.seq_len // length
        chunks = cp.chunks(length)
        positions, documents = torch.arange(length, device=device).unsqueeze(1), None
        if has_documents:
            tokens = torch.zeros(rows, length, dtype=torch.int64)
            tokens[:, length // 3] = 1  # begins a document
            positions, documents = find_documents(tokens, 1, device, chunks)
        batch = BatchPositions(cp.cut(positions, 0), documents, dtype, cp, repeats)
        for window, head_dim, kernel in {mask for mask, _ in _asked(config)}:
            pieces = number_of_pieces(
                shared, 2 * length * rows * shared * head_dim * dtype.itemsize
            )
            pieces, width = (1, head_dim) if cp.size == 1 else (pieces, 2 * head_dim)
            masks = batch.mask(window, head_dim, kernel).of_chunks
            for part, mask in zip(chunks, masks, strict=True):
                whole = torch.zeros(len(part), rows, heads, head_dim, dtype=dtype, device=device)
                q = whole[:, :, : heads // pieces]
                # with cp, keys and values are beside each other
                k, v = q.new_zeros(2, part.stop, rows, shared // pieces, width)[..., -head_dim:]
                with deterministic(device) if repeats else nullcontext():
                    _run(mask, q, k, v)


def _batches(config: Config) -> set[tuple[int, bool, bool]]:
    """The length of the micro-batches of a step, an examination and the shortest rows of a task;
    whether they have documents, and whether their gradients must repeat."""
    train, mask = config.train, config.data.document_mask
    found = {(train.seq_len, mask, train.deterministic)}
    if config.guard.examine:
        found.add((train.seq_len, mask, True))
    if train.tasks:
        parts = math.prod(cuts_of_sequence(config.parallel).values())
        found.add((padded(1, train.seq_len, parts), False, False))
    return found


def _run(mask: Attend, *inputs: Tensor) -> None:
    """Compute attention as in evaluation, and as in a step."""
    with torch.no_grad():
        mask(*inputs)
    y = mask(*(each.requires_grad_() for each in inputs))
    torch.autograd.grad(y, inputs, torch.zeros_like(y))
