"""tests/reading_path.py: a step can be read in an evening, and only what is entered is counted."""

from pathlib import Path

from proofs.ranks import Ranks
from tests.reading_path import lines_to_read, to_read

MAX_LINES = 1710


def test_a_step_is_read_in_an_evening(ranks: Ranks) -> None:
    counts = lines_to_read(ranks)
    assert {"parallel/tensor.py", "parallel/pipeline/runner.py"} <= counts.keys()
    assert sum(counts.values()) <= MAX_LINES


def test_only_what_is_entered_is_counted(tmp_path: Path) -> None:
    source = (
        '"""File."""\n\nclass A:\n    """A."""\n\n    x = 1\n\n    def f(self):\n        return 1\n'
    )
    source += "\n    def g(self):\n        return 2\n\n\ndef h():\n    return 3\n"
    (tmp_path / "file.py").write_text(source)
    assert to_read(tmp_path / "file.py", {8}) == {1, 3, 4, 5, 6, 7, 8, 9}
    assert to_read(tmp_path / "file.py", {15}) == {1, 15, 16}
