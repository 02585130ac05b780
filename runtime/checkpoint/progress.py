"""Progress bars for work that takes minutes: shown by one rank on a terminal, never in a log.

A save has none: it runs during the steps, whose log lines a bar would break up.
"""

from tqdm import tqdm


def byte_bar(doing: str, total: int, shown: bool = True) -> "tqdm[None]":
    """A bar over `total` bytes, which disappears at the end: `with byte_bar(…) as bar: …
    bar.update(bytes)`. `shown`: false on all ranks but one."""
    disable = None if shown else True  # None: disabled if standard error is not a terminal
    return tqdm(desc=doing, total=total, leave=False, disable=disable,
                unit="B", unit_scale=True, unit_divisor=1024)  # fmt: skip
