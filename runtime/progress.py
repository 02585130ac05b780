"""Bars for work that takes minutes: on a terminal's standard error, by one rank; never in a log.

Reading a checkpoint has them: comparing its files with their checksums, then loading its tensors;
`tools.verify` has the first. Preparing data has its own, over tokens (data/prepare.py). A save has
none: it goes on beside the steps, whose lines a bar would tear apart, and says one line when it is
done.
"""

from tqdm import tqdm


def byte_bar(doing: str, total: int, shown: bool = True) -> "tqdm[None]":
    """To be used as `with byte_bar(…) as bar: … bar.update(bytes)`; it is wiped away at the end.

    total: bytes. shown: false on all ranks but one.
    """
    disable = None if shown else True  # None: where standard error is no terminal
    return tqdm(
        desc=doing,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        disable=disable,
    )
