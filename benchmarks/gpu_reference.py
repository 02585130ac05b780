"""The mechanisms that gpu_training.py compares, and how each is trained; run as a program, it
trains them on the CPU.

    python -m benchmarks.gpu_reference FOLDER [TEXT]     writes the numbers of every mathematics

Mechanisms of the same mathematics have the same numbers up to rounding: recomputation, schedules,
stages of ZeRO and the compiler change none. So the CPU trains once for each mathematics, with the
plainest mechanism.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.gpu_programs import compiler
from benchmarks.gpu_rows import process_group
from benchmarks.gpu_timing import DEVICE, free_memory
from data.config import DataConfig
from model.config import ModelConfig
from parallel.config import ParallelConfig
from parallel.mesh import build_mesh
from parallel.pipeline.schedules import SCHEDULES
from tools.command import CommandParser, run_command
from tools.plan.candidates import FIXED
from training.build import build_stages
from training.config import Config
from training.sections import (
    OPTIMIZERS,
    CheckpointConfig,
    GuardConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from training.step import TrainStep

EXACT, ROUNDED = "float64", "bfloat16"
STEPS, BOS = 2, 1
PLAIN = "plain"
THREADS = 4  # of the CPU's runs, beside whatever feeds the GPU


@dataclass(frozen=True)
class Mechanism:
    """One way to train.

    mathematics: the name of the mechanism with the same numbers, up to rounding.
    settings: by section of the configuration, what differs from plain training.
    kinds: the dtypes that it supports.
    """

    name: str
    mathematics: str = PLAIN
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: tuple[str, ...] = (EXACT, ROUNDED)


def _schedules() -> list[Mechanism]:
    """Every schedule, with as many stages on the one rank as it takes."""
    return [
        Mechanism(
            f"schedule {name}",
            settings={"parallel": {"schedule": name, "stages_per_rank": FIXED.get(name, 2)}},
        )
        for name in SCHEDULES
        if name != "1f1b"
    ]


def _own(name: str, **settings: dict[str, Any]) -> Mechanism:
    """A mechanism of its own mathematics."""
    return Mechanism(name, name, settings)


MODES = ("selective", "full")
SPLIT_TIED = {"parallel": {"schedule": "zb_v", "stages_per_rank": 2}}
MECHANISMS = [
    Mechanism(PLAIN),
    *(Mechanism(m, settings={"train": {"activation_checkpointing": m}}) for m in MODES),
    _own("documents", data={"document_mask": True}),
    _own("tied embeddings", model={"tie_embeddings": True}),
    *_schedules(),
    Mechanism("compile", settings={"train": {"compile": True}}),
    *(
        Mechanism(
            f"compile, {m}",
            settings={"train": {"compile": True, "activation_checkpointing": m}},
        )
        for m in MODES
    ),
    *(Mechanism(f"zero_stage {s}", settings={"parallel": {"zero_stage": s}}) for s in (0, 2, 3)),
    Mechanism("pure_bfloat16", settings={"optimizer": {"pure_bfloat16": True}}, kinds=(ROUNDED,)),
    _own("z-loss", model={"z_loss": 1e-2}),
    *(_own(f"optimizer {o}", optimizer={"name": o}) for o in OPTIMIZERS if o != "adamw"),
    Mechanism(
        "documents, zb_v, selective, two stages",
        "documents",
        {"data": {"document_mask": True}, "train": {"activation_checkpointing": "selective"}}
        | SPLIT_TIED,
    ),
    Mechanism(
        "tied embeddings, zb_v, two stages",
        "tied embeddings",
        {"model": {"tie_embeddings": True}} | SPLIT_TIED,
    ),
    _own("sliding window", model={"attention": "sliding_window", "attention_window": 5}),
    _own("qk_norm", model={"qk_norm": True}),
    Mechanism("fsdp_unit stage", settings={"parallel": {"fsdp_unit": "stage"}}),
    Mechanism("cpu_offload", settings={"parallel": {"cpu_offload": True}}),
    Mechanism("deterministic", settings={"train": {"deterministic": True}}),
    Mechanism(
        "gradients reduced in bfloat16",
        settings={"parallel": {"reduce_dtype": "bfloat16", "zero_stage": 2}},
        kinds=(ROUNDED,),
    ),
]  # fmt: skip


def config_of(mechanism: Mechanism, kind: str, tiny: bool, kernels: str) -> Config:
    """The configuration of a small run: four micro-batches of one sequence, four layers."""
    model: dict[str, Any] = {"dim": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 512,
                             "vocab_size": 1000, "num_layers": 4}  # fmt: skip
    if tiny:
        model |= {"dim": 16, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24, "vocab_size": 40,
                  "num_layers": 2}  # fmt: skip
    sections = {
        "model": model | {"kernels": kernels},
        "parallel": {},
        "train": {"steps": 10, "seq_len": 8 if tiny else 128, "global_batch_size": 4,
                  "micro_batch_size": 1, "dtype": kind},
        "optimizer": {"lr": 1e-3},
        "data": {"path": "-"},
    }  # fmt: skip
    for section, values in mechanism.settings.items():
        sections[section] |= values
    config = Config(
        ModelConfig(**sections["model"]),
        ParallelConfig(**sections["parallel"]),
        TrainConfig(**sections["train"]),
        OptimizerConfig(**sections["optimizer"]),
        DataConfig(**sections["data"]),
        CheckpointConfig(),
        GuardConfig(),
        RunConfig(dir="-"),
    )
    config.validate(1)
    return config


def train(mechanism: Mechanism, kind: str, tiny: bool, kernels: str) -> dict[str, Tensor]:
    """Trains on this process's device: the loss, the gradient norm and every gradient of the first
    step, the loss of each step, and every weight after them, on the CPU, in their own dtypes."""
    config = config_of(mechanism, kind, tiny, kernels)
    torch.use_deterministic_algorithms(config.train.deterministic)
    mesh = build_mesh(config.parallel.mesh_sizes(1), DEVICE, config.model.has_experts)
    rows = torch.randint(
        config.model.vocab_size,
        (config.train.global_batch_size, config.train.seq_len + 1),
        generator=torch.Generator().manual_seed(0),
    )
    rows[:, :: max(2, config.train.seq_len // 5)] = BOS  # documents of a fifth of a sequence
    tokens, targets = rows[:, :-1], rows[:, 1:]
    try:
        with compiler():
            step = TrainStep(config, mesh, build_stages(config, mesh), BOS)
            loss, norm = step.forward_backward(tokens, targets)
            found = {"loss": loss, "norm": norm}
            weights = [each for each in step.weights if not each.is_copy]
            for each in weights:
                gradient = each.gradient.to_local()
                found[f"gradient of {each.global_name}"] = gradient.clone()
            for each in step.weights:
                each.parameter.grad = None
            for number in range(STEPS):
                found[f"loss of step {number + 1}"] = step(number, tokens, targets).loss
            found |= {f"weight {each.global_name}": each.sharded.to_local() for each in weights}
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
    finally:
        torch.use_deterministic_algorithms(False)
        free_memory()


def _file(folder: Path, mathematics: str, kind: str) -> Path:
    return folder / f"{mathematics.replace(' ', '_')}-{kind}.safetensors"


def load(folder: Path, mathematics: str, kind: str) -> dict[str, Tensor] | None:
    """The CPU's numbers, or None if they are not there yet."""
    path = _file(folder, mathematics, kind)
    return load_file(path) if path.exists() else None


def write(folder: Path, mechanism: Mechanism, kind: str, tiny: bool) -> None:
    path = _file(folder, mechanism.name, kind)
    partial = path.with_suffix(".partial")
    save_file(train(mechanism, kind, tiny, kernels="torch"), partial)
    partial.rename(path)  # complete, or not there


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="?", default="", help="only mechanisms named so")
    parser.add_argument("--tiny", action="store_true")
    parsed = parser.parse_args(arguments)
    asked = [m for m in MECHANISMS for k in m.kinds if parsed.only in f"{m.name}, {k}"]
    wanted = dict.fromkeys(m.mathematics for m in asked)
    with process_group():
        torch.set_num_threads(THREADS if not parsed.tiny else 1)
        for mechanism in MECHANISMS:
            if mechanism.name in wanted:
                for kind in (EXACT, ROUNDED):
                    write(parsed.folder, mechanism, kind, parsed.tiny)
    return 0


if __name__ == "__main__":
    run_command(main)
