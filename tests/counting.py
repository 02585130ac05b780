"""Record every collective, operator and the largest tensor of a computation, where operations are
dispatched, below autograd and FSDP; and what a block, and context parallelism, send."""

import re
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.positions import BatchPositions
from model.transformer import Block
from parallel.context import PIECES, ContextParallel
from parallel.layer import TensorParallel
from parallel.mesh import Mesh, build_mesh
from proofs.parity.cases import SEQ_LEN
from proofs.parity.run import as_in_long_sequences
from tests.steps import make_step, rows_of

S, B = 8, 2  # sequence and micro-batch of `one_block`
KINDS = {  # c10d's operator → kind; the largest tensor of each call is the whole tensor
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "recv",
}


@dataclass(frozen=True)
class Seen:
    """One collective: its mesh axis, its kind, and the bytes of the whole tensor (after a gather,
    before a scatter)."""

    axis: str
    kind: str
    bytes: int


class Listener(TorchDispatchMode):
    """Records collectives over more than one rank, and the size of the largest tensor in elements.

    A collective over one rank moves nothing and is not recorded. Where an axis spans the whole
    world, one group may serve both; it is then recorded under the axis.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.axes = {dist.group.WORLD.group_name: "world", mesh.loss.group.group_name: "loss"}
        self.axes |= {
            view.group.group_name: axis
            for axis, view in reversed(mesh.views.items())
            if axis not in ("batch", "loss") and view.size > 1
        }
        self.collectives: list[Seen] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        namespace, _, name = func.name().split(".")[0].partition("::")
        if namespace == "c10d":
            objects = [a for a in args if isinstance(a, torch.ScriptObject)]
            group = next(each for each in objects if "ProcessGroup" in str(each._type()))
            self._saw(name, dist.ProcessGroup.unbox(group), tensors)
        # how DTensor reduces partial sums
        elif namespace == "_c10d_functional" and name == "all_reduce":
            self._saw(name, _resolve_process_group(args[2]), tensors)
        else:
            self.largest = max([self.largest, *(t.numel() for t in tensors)])
        return result

    def _saw(self, name, group, tensors):
        if group.size() > 1:
            axis, size = self.axes.get(group.group_name, "other"), max(t.nbytes for t in tensors)
            self.collectives.append(Seen(axis, KINDS.get(name, name), size))

    def count(self, axis: str | None = None) -> dict[str, tuple[int, int]]:
        """Kind → (number of collectives, their total bytes), over `axis` or over all axes."""
        table: dict[str, tuple[int, int]] = {}
        for seen in self.collectives:
            if axis in (None, seen.axis):
                number, size = table.get(seen.kind, (0, 0))
                table[seen.kind] = number + 1, size + seen.bytes
        return table


class Operators(TorchDispatchMode):
    """Notes the operators that the dispatcher sees, and their arguments without names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []
        self.arguments: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func)
        self.arguments.append(args)
        return func(*args, **(kwargs or {}))

    def attention(self) -> list[object]:
        """Those that compute attention, by their names: an operator that no kernel names is found
        too."""
        forward = [each for each in self.found if "backward" not in each.name().split("::")[1]]
        return [e for e in forward if re.search("attention|attn", e.name().split("::")[1])]


def one_block(case):
    """The collectives of one block's forward and backward, without data parallelism."""
    config = case.config()
    mesh = build_mesh(config.parallel.mesh_sizes(dist.get_world_size()), "cpu")
    torch.manual_seed(0)
    tp = TensorParallel.of(mesh, case.sequence_parallel, case.tp_pieces)
    block = Block(config.model, 0, tp).to(torch.float64).to_empty(device="cpu")
    with torch.no_grad():
        for p in block.parameters():
            p.to_local().normal_()
    rows = S // tp.size if case.sequence_parallel else S
    x = torch.randn(rows, B, config.model.dim, dtype=torch.float64, requires_grad=True)
    positions = BatchPositions(torch.arange(S).unsqueeze(1), None, torch.float64, ContextParallel())
    inputs = block.attention.inputs(positions)
    with Listener(mesh) as forward:
        y = block(x, *inputs)
    with Listener(mesh) as backward:
        y.backward(torch.ones_like(y))
    return forward.count(), backward.count()


MICROBATCHES = 2  # of a step in which communication over cp is counted


def short_step(case, rows):
    """A training step with two micro-batches of `rows` sequences, and this rank's batch."""
    config = case.config()
    size = MICROBATCHES * rows
    train = replace(config.train, micro_batch_size=rows, global_batch_size=size * case.layout.dp)
    step = make_step(replace(config, train=train))
    return step, [each[:size] for each in rows_of(step)]


def sent_over_cp(case, rows, training, plant=nullcontext):
    """The collectives over cp of the forward and backward, or the evaluation, of two micro-batches
    of `rows` sequences."""
    with as_in_long_sequences(), plant():
        step, batch = short_step(case, rows)
        with Listener(step.mesh) as listener:
            step.forward_backward(*batch) if training else step.evaluate(*batch)
    return listener.count("cp")


def once(case, rows, kv_heads, itemsize):
    """A collective per piece of a layer's key/value heads of one tp rank, over all layers and
    micro-batches of a stage, and their bytes: 2 · S·B·K/tp·E numbers in each layer."""
    model = case.config().model
    passes = model.num_layers // case.layout.pp * MICROBATCHES
    pieces = max(n for n in range(1, PIECES + 1) if kv_heads % n == 0)
    size = 2 * SEQ_LEN * rows * kv_heads * model.head_dim * itemsize
    return passes * pieces, passes * size
