"""The programs that GPU benchmarks train with: ours, and Hugging Face's Llama.

There are two models of Llama 3's shapes, trained on sequences of 8192 random tokens, one sequence
in a micro-batch: one with the 8-billion model's width and as many layers as fit, and the complete
1-billion model. A third, which only our program trains, has three layers of Qwen3-30B-A3B with
128 experts each, a vocabulary so small that the head takes little time, and eight sequences of 4096
tokens in a micro-batch. All programs do the same: forward and backward of every micro-batch, the
gradients' norm, clipping, AdamW. A step includes nothing else: no data loading, no logging.

Dtypes of computation and storage:
    lattice         train.dtype=bfloat16: FSDP casts float32 weights once per step; moments and
                    summed gradients are float32
    hugging face    the same arithmetic with PyTorch's means: float32 weights, gradients and
                    moments, autocast to bfloat16; SDPA, fused AdamW, the model's own loss
    … bfloat16      weights and moments stored in bfloat16: lattice rounds stochastically
                    (optimizer.pure_bfloat16), the other to nearest. These need less memory and
                    bandwidth, and are not comparable with the other rows.
Our programs are those that train.py runs: build_stages and TrainStep, on a mesh of one process.
Only the weights differ: they are drawn on the device (`draw_on_device`), because drawing the usual
ones, which are the same for every layout, takes minutes on a CPU.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.timing import DEVICE, ON_GPU, compiled
from costs.summary import flops_per_token
from errors import UserError
from model.config import ModelConfig
from model.kernels.attention import unload_flash3
from model.kernels.attention_choice import BY_REQUEST, KEY
from parallel.activation import Mode
from parallel.parameter import Constant, weights_of
from proofs.parity.run import make_step
from settings.checks import validate
from settings.config import SECTIONS, Config
from tools.huggingface.config import config_json
from training.step import TrainStep

WIDE, SMALL, EXPERTS = "8B width", "1B", "Qwen3-30B-A3B width"
AUTO = "auto"
ATTENTION_KERNELS = (AUTO, *BY_REQUEST)  # the values of model.attention_kernel


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    model: ModelConfig
    seq_len: int
    microbatches: int = 4
    sequences: int = 1  # of a micro-batch

    @property
    def rows(self) -> int:
        """The number of sequences of a step."""
        return self.microbatches * self.sequences

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    @property
    def flops(self) -> float:
        return self.tokens * flops_per_token(self.model, self.seq_len)


@cache
def sizes() -> dict[str, Size]:
    """The sizes to measure. A parameter takes about 22 bytes in training, so 12 layers at the
    8-billion width take 81 GB, plus 17 GB of activations."""
    if not ON_GPU:
        model = ModelConfig(
            dim=32, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=64, vocab_size=96
        )
        tiny = {"count": 4, "per_token": 2, "ffn_dim": 16}
        experts = replace(model, feed_forward="experts", experts=tiny)
        return {
            WIDE: Size(model, 8, 1),
            SMALL: Size(replace(model, tie_embeddings=True), 8, 1),
            EXPERTS: Size(experts, 8, 1, sequences=2),
        }
    layers = 12 if torch.cuda.get_device_properties(0).total_memory > 120e9 else 4
    wide = ModelConfig(
        dim=4096, num_layers=layers, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=128256
    )
    small = replace(wide, dim=2048, num_layers=16, ffn_dim=8192, tie_embeddings=True)
    qwen = ModelConfig(
        dim=2048, num_layers=3, num_heads=32, num_kv_heads=4, attention_dim=4096, qk_norm=True,
        ffn_dim=6144, vocab_size=16384,
    )  # fmt: skip
    own = {"count": 128, "per_token": 8, "ffn_dim": 768, "router_aux_weight": 1e-3}
    experts = replace(qwen, feed_forward="experts", experts=own)
    return {
        WIDE: Size(wide, 8192),
        SMALL: Size(small, 8192),
        EXPERTS: Size(experts, 4096, sequences=8),  # a micro-batch as in configs/qwen3_30b_a3b.yaml
    }


@dataclass(frozen=True)
class Variant:
    """A program and how it runs."""

    program: Literal["lattice", "hugging face"] = "lattice"
    kernels: Literal["triton", "torch"] = "triton"  # lattice only
    checkpointing: Mode = "none"  # lattice only
    compile: bool = False
    liger: bool = False  # hugging face only
    bfloat16: bool = False  # whether weights and moments are stored in bfloat16
    attention: str = AUTO  # lattice only: one of ATTENTION_KERNELS
    zero_stage: Literal[0, 1, 2, 3] = 1  # lattice only
    longer: bool = False  # a step of four times as many micro-batches
    optimizer: str = "adamw"  # lattice only

    @property
    def name(self) -> str:
        parts = [self.program]
        parts += [self.kernels] if self.program == "lattice" else []
        parts += ["liger"] * self.liger
        parts += [f"{self.checkpointing} checkpointing"] * (self.checkpointing != "none")
        parts += [self.attention] * (self.attention != AUTO)
        parts += ["compiled"] * self.compile + ["bfloat16"] * self.bfloat16
        parts += [self.optimizer] * (self.optimizer != "adamw")
        parts += [f"zero_stage {self.zero_stage}"] * (self.zero_stage != 1)
        return ", ".join(parts + ["long step"] * self.longer)

    def of(self, size: Size) -> Size:
        """The size with this variant's number of micro-batches."""
        return replace(size, microbatches=size.microbatches * (4 if self.longer else 1))


# rows of tokens [microbatches, S + 1] → loss and gradient norm
Step = Callable[[Tensor], tuple[Tensor, Tensor]]


def make_config(**sections: dict[str, Any]) -> Config:
    """A configuration of one process, from the keys of each section."""
    given = {"data": {"path": "-"}, "run": {"dir": "-"}, **sections}
    config = Config(**{name: cls(**given.get(name, {})) for name, cls in SECTIONS.items()})
    validate(config, 1)
    return config


def config_of(size: Size, variant: Variant) -> Config:
    """The configuration of one of our programs."""
    kernels = {"kernels": variant.kernels, "attention_kernel": variant.attention}
    return make_config(
        model=vars(size.model) | kernels,
        parallel={"zero_stage": variant.zero_stage},
        train={
            "steps": 100,
            "seq_len": size.seq_len,
            "global_batch_size": size.rows,
            "micro_batch_size": size.sequences,
            "compile": variant.compile,
            "activation_checkpointing": variant.checkpointing,
        },
        optimizer={"lr": 1e-4, "name": variant.optimizer, "pure_bfloat16": variant.bfloat16},
    )


@torch.no_grad()
def draw_on_device(stage: torch.nn.Module, seed: int) -> None:
    """Draw weights with the usual standard deviation."""
    for each in weights_of(stage):
        local, initial = each.sharded.to_local(), each.spec.initial
        local.fill_(initial.value) if isinstance(initial, Constant) else local.normal_(
            0.0, initial.std
        )


def build(config: Config) -> TrainStep:
    """Our training step on one process, with weights drawn on the device."""
    torch.manual_seed(config.train.seed)
    with patch("training.build.initialise", draw_on_device), compiler():
        return make_step(config, DEVICE)


def lattice(size: Size, variant: Variant) -> Step:
    train = build(config_of(size, variant))
    steps = itertools.count()

    def step(rows: Tensor) -> tuple[Tensor, Tensor]:
        result = train(next(steps), rows[:, :-1], rows[:, 1:])
        return result.loss, result.grad_norm

    return step


def compiler() -> contextlib.AbstractContextManager[Any]:
    """Without a GPU, makes torch.compile run the traced graphs without compiling them, because
    compiling them for a CPU would prove nothing more."""
    return contextlib.nullcontext() if ON_GPU else patch.object(torch, "compile", compiled)


@contextlib.contextmanager
def attention_kernels() -> Iterator[None]:
    """A context for one row, in which kernels of attention are chosen. Skips the row if the wanted
    kernel cannot run.

    A process that has loaded flash 3 runs it in place of flash 2, and in torch's own choice. At the
    end of this context torch's flash 2 is there again.
    """
    try:
        yield
    except UserError as error:
        if error.key != KEY:
            raise
        pytest.skip(f"{error.value}: {error.why}")
    finally:
        unload_flash3()


def hugging_face(size: Size, variant: Variant) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    if variant.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    same = config_json(size.model, dtype="float32", max_length=size.seq_len)
    config = LlamaConfig(**same | {"use_cache": False}, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(DEVICE):  # weights are drawn there too
        model = LlamaForCausalLM(config).to(torch.bfloat16 if variant.bfloat16 else torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    forward = compiled(model) if variant.compile else model

    def step(rows: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=DEVICE)
        for row in rows[:, :-1].to(DEVICE, non_blocking=True).split(1):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=not variant.bfloat16):
                # their loss shifts the labels itself
                loss = forward(input_ids=row, labels=row).loss / size.microbatches
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return step
