"""Finds the matrix products that leave multiprocessors of the device without work.

A product is computed tile by tile, each tile of the result by one multiprocessor. So it takes
⌈tiles / multiprocessors⌉ waves, and in a wave with fewer tiles than multiprocessors the others are
idle ("wave quantization": NVIDIA, Matrix Multiplication Background User's Guide, section 3.2). A
product below one wave never uses the whole device. This happens to weights that tp makes narrow,
first of all to those of key and value. docs/plan_model.md explains what is assumed about tiles.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from costs.events import Product
from costs.units import Unit
from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from tools.plan.hardware import Device
from tools.plan.layout import Layout


def narrow_products(layout: Layout, device: Device) -> list[dict[str, Any]]:
    """The products of a block of each kind, and of the head, with fewer tiles than `device` has
    multiprocessors; one entry for all of the same three sizes, most FLOPs first. `weights` are the
    weights that have products of these sizes, `results` the narrow ones' rows and columns, `tiles`
    the least number of tiles of one, `share` their part of the FLOPs of the unit's products."""
    found = []
    for unit in (*layout.kinds, layout.head):
        products = _products(layout, unit)
        flops = sum(product.flops for product in products)
        alike: dict[tuple[int, ...], list[Product]] = defaultdict(list)
        # a weight's three products (forward, input and weight gradient) have the same three sizes
        for product in products:
            alike[tuple(sorted((product.rows, product.columns, product.inner)))].append(product)
        for same in alike.values():
            narrow = [p for p in same if _tiles(p, device) < device.multiprocessors]
            if narrow:
                found.append(
                    {
                        "unit": unit.name,
                        "weights": sorted({product.weight for product in same} - {""}),
                        "results": sorted({(product.rows, product.columns) for product in narrow}),
                        "tiles": min(_tiles(product, device) for product in narrow),
                        "share": sum(product.flops for product in narrow) / flops,
                    }
                )
    return sorted(found, key=lambda one: -one["share"])


def _tiles(product: Product, device: Device) -> int:
    """Those that are computed at once."""
    return product.tiles(device.tile) // product.launches


def _products(layout: Layout, unit: Unit) -> list[Product]:
    """Those of one micro-batch, as the layout runs them."""
    backward = (BACKWARD_INPUT, BACKWARD_WEIGHT) if layout.splits_backward else (BACKWARD,)
    events = (event for kind in (FORWARD, *backward) for event in layout.phase(kind, unit).events)
    return [event for event in events if isinstance(event, Product)]


def describe_narrow(found: Sequence[dict[str, Any]], layout: Layout, device: Device) -> list[str]:
    """The warning, as lines of text; none if nothing was found."""
    if not found:
        return []
    lines = [
        f"warning: products with fewer tiles of {device.tile} × {device.tile} than the "
        f"{device.multiprocessors} multiprocessors, the rest of which are idle:"
    ]
    for one in found:
        names = ", ".join(one["weights"]) or "products without a weight"
        sizes = " and ".join(f"{rows:,} × {columns:,}" for rows, columns in one["results"])
        lines.append(
            f"    {names}: results of {sizes}, {one['tiles']} tiles; {one['share']:.1%} of the "
            f"FLOPs in the products of {one['unit']}"
        )
    remedies = ["a smaller parallel.tp"] if layout.tp > 1 else []
    if any(layout.tokens in result for one in found for result in one["results"]):
        remedies.append("a larger train.micro_batch_size (except for weight gradients)")
    remedies.append("one product for weights that read the same input (query, key, value)")
    return [*lines, f"    remedies: {'; '.join(remedies)}"]
