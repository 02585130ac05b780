"""One row of the parity proof: the errors of a case against the reference, their bounds, and the
row as text and as JSON."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from proofs.parity.cases import Case

# Weights and copies must be equal bit for bit. In float64, rounding errors are so small that they
# hide no bug. Float32 rounds at 6e-8, and Adam, which divides by the gradient's size, amplifies
# that in each step.
BOUNDS: dict[str, dict[str, float]] = {
    "float64": {
        **{"weights": 0.0, "spread": 0.0, "loss": 1e-11, "norm": 1e-11, "gradient": 1e-11},
        **{"loss_steps": 1e-9, "norm_steps": 1e-9, "routes": 0.0, "balance": 1e-11, "bias": 0.0},
    },
    "float32": {
        **{"weights": 0.0, "spread": 0.0, "loss": 1e-5, "norm": 1e-5, "gradient": 1e-4},
        **{"loss_steps": 1e-4, "norm_steps": 1e-4, "routes": 0.0, "balance": 1e-5, "bias": 0.0},
    },
}


@dataclass
class Row:
    """The errors of a case against the reference, relative: ‖a − b‖ / ‖b‖. NaN: a is missing."""

    case: Case
    weights: float = 0.0  # initial weights of the worst parameter
    # the largest difference between copies; infinite if ranks report different losses or norms
    spread: float = 0.0
    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    worst: str = ""  # the parameter with the error `gradient`
    loss_steps: float = 0.0  # the worst of all optimizer steps
    norm_steps: float = 0.0
    routes: int = 0  # tokens that chose other experts, and layers with other counts
    balance: float = 0.0  # the losses of routers
    bias: float = 0.0  # the largest difference, after all steps
    seconds: float = 0.0
    crash: str = ""  # the ranks' messages, if they did not finish

    def failures(self) -> list[str]:
        """The names of the errors that are out of bounds."""
        if self.crash:
            return ["crash"]
        return [
            name
            for name, bound in BOUNDS[self.case.dtype].items()
            if not getattr(self, name) <= bound
        ]


def line(row: Row, steps: int) -> str:
    """One row as text."""
    verdict = "FAIL" if row.failures() else "ok"
    text = f"{verdict:4} {row.seconds:5.1f} s  "
    if row.crash:
        return f"{text}{row.case}\n{row.crash}"
    text += (
        f"weights {row.weights:.0e} copies {row.spread:.0e} loss {row.loss:.0e} norm "
        f"{row.norm:.0e} "
    )
    text += f"gradient {row.gradient:.0e} ({row.worst})"
    if steps:
        text += f" | {steps} steps: loss {row.loss_steps:.0e} norm {row.norm_steps:.0e}"
    if row.case.router is not None:
        text += f" | routes {row.routes} balance {row.balance:.0e} bias {row.bias:.0e}"
    text += f"  {row.case}"
    return f"{text}\n     out of bounds: {', '.join(row.failures())}" if row.failures() else text


def as_json(row: Row, steps: int) -> dict[str, Any]:
    errors = {name: value for name, value in asdict(row).items() if name != "case"}
    numbers = {
        n: (None if isinstance(v, float) and not math.isfinite(v) else v) for n, v in errors.items()
    }
    options = {name: value for name, value in asdict(row.case).items() if name != "layout"}
    return {
        **row.case.layout.by_axis(),
        "ep": row.case.layout.ep,
        **options,
        "steps": steps,
        **numbers,
        "failures": row.failures(),
    }
