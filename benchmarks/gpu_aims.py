"""The aims of the GPU benchmarks, and whether what was measured reaches them."""

from typing import Any

from benchmarks.gpu_estimates import BANDWIDTH_AIM, MEMORY_AIM, PRODUCTS_AIM
from benchmarks.gpu_operations import Case
from benchmarks.gpu_status import MEASURED


def at_least(bound: float, measured: float) -> dict[str, Any]:
    """An aim in a row: its bound, and whether it is reached."""
    return {"at_least": bound, "met": measured >= bound}


def at_most(bound: float, measured: float) -> dict[str, Any]:
    """The same of an upper bound."""
    return {"at_most": bound, "met": measured <= bound}


def verdict(aim: dict[str, Any]) -> str:
    return "met" if aim["met"] else "MISSED"


def bandwidth_aim(row: dict) -> str:
    """Adds the aim to the row of our kernel, and returns a description of it for the table."""
    fraction = row.get("fraction_of_copy")
    if fraction is None:
        return ""
    row["aims"] = {"fraction_of_copy": at_least(BANDWIDTH_AIM, fraction)}
    return f"{fraction:.0%} of a copy: {verdict(row['aims']['fraction_of_copy'])}"


def head_aims(rows: dict[str, dict], case: Case, at_full_size: bool) -> str:
    """The same for projection and loss: time compared with that of the products, and memory with
    that of eager PyTorch."""
    ours, said = rows["triton"], []
    if ours["status"] != MEASURED or not at_full_size:
        return ""
    ours["aims"] = {}
    if rows["matmul"]["status"] == MEASURED:
        ratio = ours["milliseconds"]["median"] / rows["matmul"]["milliseconds"]["median"]
        ours["aims"]["over_three_products"] = {
            "found": ratio,
            **at_most(PRODUCTS_AIM, ratio),
        }
        said.append(
            f"{ratio:.3f} of three products: {verdict(ours['aims']['over_three_products'])}"
        )
    if rows["torch"]["status"] == MEASURED and ours["peak_memory_bytes"] is not None:
        peaks = {name: rows[name]["peak_memory_bytes"] for name in ("triton", "torch")}
        beyond = {name: peak - case.weight_gradient_bytes[name] for name, peak in peaks.items()}
        ratio, with_gradient = (
            bytes_of["triton"] / bytes_of["torch"] for bytes_of in (beyond, peaks)
        )
        ours["aims"]["memory_over_eager"] = {
            "found": ratio,
            **at_most(MEMORY_AIM, ratio),
            "bytes_beyond_weight_gradient": beyond,
            "with_weight_gradient": with_gradient,
        }
        said.append(
            f"1/{1 / ratio:.1f} of eager's memory: {verdict(ours['aims']['memory_over_eager'])}"
            f" (with the weight's gradients 1/{1 / with_gradient:.1f})"
        )
    return ", ".join(said)
