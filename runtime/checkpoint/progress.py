"""Progress bars for work that takes minutes: shown by one rank on a terminal, never in a log.

They are used while a checkpoint's files are compared with their checksums (also by `tools.verify`)
and while its tensors are loaded. Preparing data has its own bar, over tokens (data/prepare.py). A
save has none: it runs during the steps, whose log lines a bar would break up, and logs one line
when it is done.
"""

from tqdm import tqdm


def byte_bar(doing: str, total: int, shown: bool = True) -> "tqdm[None]":
    """Return a progress bar over bytes, which disappears at the end; use it as `with byte_bar(…) as
    bar: … bar.update(bytes)`.

    total: the number of bytes. shown: false on all ranks but one.
    """
    disable = None if shown else True  # None: disabled if standard error is not a terminal
    return tqdm(
        desc=doing,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        disable=disable,
    )
