"""The dtypes of a run.

| train.dtype | compute  | master                         | reduce                | exact   |
|-------------|----------|--------------------------------|-----------------------|---------|
| bfloat16    | bfloat16 | float32; bfloat16 with         | parallel.reduce_dtype | float32 |
|             |          | optimizer.pure_bfloat16        |                       |         |
| float32     | float32  | float32                        | parallel.reduce_dtype | float32 |
| float64     | float64  | float64                        | float64               | float64 |
"""

from typing import NamedTuple, Protocol

import torch

from settings.parallel import ParallelConfig
from settings.sections import OptimizerConfig, TrainConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Sections(Protocol):
    """The sections of a configuration that determine dtypes."""

    @property
    def train(self) -> TrainConfig: ...

    @property
    def parallel(self) -> ParallelConfig: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...


class Precision(NamedTuple):
    """The dtypes of a run."""

    compute: torch.dtype  # forward and backward
    master: torch.dtype  # weights, moments and reduced gradients between steps
    reduce: torch.dtype  # data-parallel reductions of gradients
    exact: torch.dtype  # statistics and losses

    @classmethod
    def of(cls, config: Sections) -> "Precision":
        compute = DTYPES[config.train.dtype]
        exact = torch.promote_types(compute, torch.float32)
        return cls(
            compute=compute,
            master=compute if config.optimizer.pure_bfloat16 else exact,
            reduce=compute if compute == torch.float64 else DTYPES[config.parallel.reduce_dtype],
            exact=exact,
        )
