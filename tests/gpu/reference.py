"""The mechanisms that test_training.py compares, and how each is trained; run as a program, it
trains them on the CPU.

    python -m tests.gpu.reference FOLDER full|tiny NAME…   writes the numbers of these mathematics

Mechanisms of the same mathematics have the same numbers up to rounding: recomputation, schedules,
stages of ZeRO and the compiler change none. So the CPU trains once for each mathematics, with the
plainest mechanism.
"""

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.programs import compiler, make_config
from benchmarks.gpu.timing import DEVICE, ON_GPU, free_memory
from kinds import kinds_in
from parallel.activation import Mode
from parallel.pipeline.schedules import SCHEDULES, STAGES_PER_RANK
from proofs.parity.cases import BOS
from proofs.parity.run import make_step
from runtime.start.init import init_distributed
from settings.config import Config
from tests.gpu.checks import Check

EXACT, ROUNDED = "float64", "bfloat16"
EXACT_BOUND = 1e-9
TIMES, PLUS = 2.0, 2**-8  # of the CPU's own error in bfloat16, and beside it
STEPS = 2
PLAIN = "plain"
THREADS = 4  # of the CPU's runs, beside whatever feeds the GPU
# four micro-batches of one sequence; documents of a fifth of a sequence
FULL = {"dim": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 512, "vocab_size": 1000,
        "num_layers": 4}  # fmt: skip
TINY = {"dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "vocab_size": 40,
        "num_layers": 2}  # fmt: skip

# deterministic cuBLAS requires it, and reads it at its first use, as in train.py
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class Mechanism:
    """One way to train."""

    name: str
    mathematics: str = PLAIN  # the mechanism with the same numbers, up to rounding
    # by section of the configuration, what differs from plain training
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: tuple[str, ...] = (EXACT, ROUNDED)  # the dtypes that it supports


def _same(name: str, section: str, kinds: tuple[str, ...] = (EXACT, ROUNDED), **keys: Any) -> Any:
    """A mechanism of plain mathematics."""
    return Mechanism(name, PLAIN, {section: keys}, kinds)


def _own(name: str, section: str, /, **keys: Any) -> Mechanism:
    """A mechanism of its own mathematics."""
    return Mechanism(name, name, {section: keys})


MODES = [mode for mode in get_args(Mode) if mode != "none"]
EXPERTS = {"count": 8, "per_token": 2, "ffn_dim": 32, "num_shared": 1, "router_aux_weight": 1e-2}
SPLIT = {"schedule": "zb_v", "stages_per_rank": 2}
MECHANISMS = [
    Mechanism(PLAIN),
    *(_same(mode, "train", activation_checkpointing=mode) for mode in MODES),
    _own("documents", "data", document_mask=True),
    _own("tied embeddings", "model", tie_embeddings=True),
    # every schedule, with as many stages on the one rank as it takes
    *(
        _same(
            f"schedule {name}",
            "parallel",
            schedule=name,
            stages_per_rank=STAGES_PER_RANK.get(name, 2),
        )
        for name in SCHEDULES
        if name != "1f1b"
    ),
    _same("compile", "train", compile=True),
    *(_same(f"compile, {m}", "train", compile=True, activation_checkpointing=m) for m in MODES),
    *(_same(f"zero_stage {stage}", "parallel", zero_stage=stage) for stage in (0, 2, 3)),
    _same("pure_bfloat16", "optimizer", (ROUNDED,), pure_bfloat16=True),
    _own("z-loss", "model", z_loss=1e-2),
    *(_own(f"optimizer {name}", "optimizer", name=name)
      for name in kinds_in("training.optimizers") if name != "adamw"),
    Mechanism("documents, zb_v, selective, two stages", "documents",
              {"data": {"document_mask": True}, "parallel": SPLIT,
               "train": {"activation_checkpointing": "selective"}}),
    Mechanism("tied embeddings, zb_v, two stages", "tied embeddings",
              {"model": {"tie_embeddings": True}, "parallel": SPLIT}),
    _own("sliding window", "model", attention="sliding_window", sliding_window={"window": 5}),
    _own("qk_norm", "model", qk_norm=True),
    _own("experts", "model", experts=EXPERTS),
    *(Mechanism(f"experts, {mode}", "experts",
                {"model": {"experts": EXPERTS}, "train": {"activation_checkpointing": mode}})
      for mode in MODES),
    _own("experts, sigmoid_bias", "model", experts=EXPERTS, router="sigmoid_bias"),
    _same("fsdp_unit stage", "parallel", fsdp_unit="stage"),
    _same("offload host", "parallel", offload="host"),
    _same("offload disk", "parallel", offload="disk", offload_dir=tempfile.gettempdir()),
    _same("deterministic", "train", deterministic=True),
    _same("gradients reduced in bfloat16", "parallel", (ROUNDED,), reduce_dtype="bfloat16",
          zero_stage=2),
]  # fmt: skip


def config_of(mechanism: Mechanism, kind: str, kernels: str, full: bool) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": (FULL if full else TINY) | {"kernels": kernels},
        "train": {"steps": 10, "seq_len": 128 if full else 8, "global_batch_size": 4,
                  "micro_batch_size": 1, "dtype": kind},
        "optimizer": {"lr": 1e-3},
        "data": {"path": "-"},
    }  # fmt: skip
    for section, values in mechanism.settings.items():
        sections[section] = sections.get(section, {}) | values
    return make_config(**sections)


def train(mechanism: Mechanism, kind: str, kernels: str, full: bool = ON_GPU) -> dict[str, Tensor]:
    """Trains on this process's device: the loss, the gradient norm and every gradient of the first
    step, the loss of each step, and every weight after them, on the CPU, in their own dtypes."""
    config = config_of(mechanism, kind, kernels, full)
    torch.use_deterministic_algorithms(config.train.deterministic)
    shape = config.train.global_batch_size, config.train.seq_len + 1
    seed = torch.Generator().manual_seed(0)
    rows = torch.randint(config.model.vocab_size, shape, generator=seed)
    rows[:, :: max(2, config.train.seq_len // 5)] = BOS
    tokens, targets = rows[:, :-1], rows[:, 1:]
    try:
        with compiler():
            step = make_step(config, DEVICE)
            loss, norm = step.forward_backward(tokens, targets)
            found = {"loss": loss, "norm": norm}
            weights = [each for each in step.weights if not each.is_copy]
            for each in weights:
                found[f"gradient of {each.global_name}"] = each.gradient.to_local().clone()
            for each in step.weights:
                each.parameter.grad = None
            for number in range(STEPS):
                found[f"loss of step {number + 1}"] = step(number, tokens, targets).loss
            found |= {f"weight {each.global_name}": each.sharded.to_local() for each in weights}
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
    finally:
        torch.use_deterministic_algorithms(False)
        free_memory()


def compare(
    found: dict[str, Tensor], exact: dict[str, Tensor], rounded: dict[str, Tensor] | None
) -> list[Check]:
    """Compares tensors by name. rounded: the CPU's own results in bfloat16, if `found` is in
    bfloat16; updated weights are then left out, because an update depends on a gradient's sign
    however small it is."""
    names = [name for name in exact if rounded is None or not name.startswith("weight ")]
    missing = sorted(set(names) - found.keys())
    assert not missing, f"there is no {', '.join(missing)}"
    bounds = dict.fromkeys(names, EXACT_BOUND)
    if rounded is not None:
        bounds = {name: TIMES * error(rounded[name], exact[name]) + PLUS for name in names}
    return [Check(name, error(found[name], exact[name]), bounds[name]) for name in names]


def error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖; of two zeros 0."""
    size = exact.double().norm()
    off = (found.double() - exact.double()).norm()
    return (off / size).item() if size else off.item()


def file_of(folder: Path, mathematics: str, kind: str) -> Path:
    """The CPU's numbers; not there yet, or complete."""
    return folder / f"{mathematics.replace(' ', '_')}-{kind}.safetensors"


def main(folder: Path, full: bool, names: list[str]) -> None:
    init_distributed()
    torch.set_num_threads(THREADS)
    for mechanism in MECHANISMS:
        for kind in (EXACT, ROUNDED) if mechanism.name in names else ():
            path = file_of(folder, mechanism.name, kind)
            partial = path.with_suffix(".partial")
            save_file(train(mechanism, kind, "torch", full), partial)
            partial.rename(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "full", sys.argv[3:])
