"""tests/reading_path.py: a step can be read in an evening."""

from proofs.ranks import Ranks
from tests.reading_path import lines_to_read

MAX_LINES = 1795


def test_a_step_is_read_in_an_evening(ranks: Ranks) -> None:
    counts = lines_to_read(ranks)
    assert {"parallel/tensor.py", "parallel/pipeline/runner.py"} <= counts.keys()
    assert sum(counts.values()) <= MAX_LINES
