"""One row of the parity proof: the errors of a case against the reference, and their bounds."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from proofs.parity.cases import Case

# Weights and copies must be equal bit for bit. In float64, rounding errors are so small that they
# hide no bug. Float32 rounds at 6e-8, and Adam, which divides by the gradient's size, amplifies
# that in each step.
BOUNDS: dict[str, dict[str, float]] = {
    "float64": {
        "weights": 0.0, "spread": 0.0, "loss": 1e-11, "norm": 1e-11, "gradient": 1e-11,
        "loss_steps": 1e-9, "norm_steps": 1e-9, "updated": 1e-9,
        "routes": 0.0, "balance": 1e-11, "bias": 0.0,
    },
    "float32": {
        "weights": 0.0, "spread": 0.0, "loss": 1e-5, "norm": 1e-5, "gradient": 1e-4,
        "loss_steps": 1e-4, "norm_steps": 1e-4, "updated": 1e-4,
        "routes": 0.0, "balance": 1e-5, "bias": 0.0,
    },
}  # fmt: skip


@dataclass
class Row:
    """The errors of a case against the reference, relative: ‖a − b‖ / ‖b‖. NaN: a is missing."""

    case: Case
    steps: int = 0  # how many optimizer steps were compared
    weights: float = 0.0  # initial weights of the worst parameter
    # the largest difference between copies; infinite if ranks report different losses or norms
    spread: float = 0.0
    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    worst: str = ""  # the parameter with the error `gradient`
    loss_steps: float = 0.0  # the worst of all steps
    norm_steps: float = 0.0
    updated: float = 0.0  # weights after all steps, of the worst parameter
    # tokens that chose other experts, layers with other counts, and one if ranks differ
    routes: int = 0
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

    def __str__(self) -> str:
        bad = self.failures()
        text = f"{'FAIL' if bad else 'ok':4} {self.seconds:5.1f} s  "
        if self.crash:
            return f"{text}{self.case}\n{self.crash}"
        text += " ".join(f"{name} {getattr(self, name):.0e}" for name in BOUNDS[self.case.dtype])
        text += f" ({self.worst}) after {self.steps} steps  {self.case}"
        return f"{text}\n     out of bounds: {', '.join(bad)}" if bad else text

    def as_json(self) -> dict[str, Any]:
        """All fields, with those of the case and its layout among them; null for what is no number,
        or infinite."""
        errors = asdict(self)
        options = errors.pop("case")
        del options["layout"]  # which has what only the mesh of a run needs, too
        layout = {**self.case.layout.by_axis(), "ep": self.case.layout.ep}
        found = {**layout, **options, **errors, "failures": self.failures()}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in found.items()
        }
