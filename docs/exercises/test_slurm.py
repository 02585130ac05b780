"""Two exercises for docs/slurm.md: complete the functions, then run `.venv/bin/python -m
pytest docs/exercises/test_slurm.py`."""

import pytest


def time_lost(interval: float, save: float, restart: float, mean_between_failures: float) -> float:
    """The expected fraction of a run's time that is lost, to first order. All times are in seconds.

    After every `interval` seconds of training, a save costs `save` seconds. Failures occur at
    random, on average once in `mean_between_failures` seconds. Each costs `restart` seconds and the
    steps since the last save, half an interval on average.
    """
    raise NotImplementedError("yours to write")


def best_interval(save: float, mean_between_failures: float) -> float:
    """The interval between saves that loses the least time (Young 1974,
    https://doi.org/10.1145/361147.361115)."""
    raise NotImplementedError("yours to write")


def test_what_is_lost() -> None:
    assert time_lost(600, 6, 0, 1e12) == pytest.approx(0.01, rel=1e-3)  # only saves
    assert time_lost(600, 0, 300, 6000) == pytest.approx(0.1)  # only failures
    # 16,384 GPUs, 419 unexpected interruptions in 54 days (Llama 3, section 3.3.4), ten minutes to
    # start again.
    assert time_lost(600, 5, 600, 54 * 86400 / 419) == pytest.approx(0.0892, abs=1e-3)


@pytest.mark.parametrize(("save", "between"), [(5, 11_000), (60, 86_400), (0.5, 1e6)])
def test_the_best_interval_loses_least(save: float, between: float) -> None:
    best = best_interval(save, between)
    least = time_lost(best, save, 0, between)
    assert all(time_lost(best * factor, save, 0, between) > least for factor in (0.5, 0.9, 1.1, 2))
