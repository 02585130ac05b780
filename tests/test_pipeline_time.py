"""The pipeline runner takes as long as the simulator predicts: on four ranks over gloo, with
actions that wait instead of computing."""

import pytest

from benchmarks.pipeline_schedules import PAIRS, measure


@pytest.mark.parametrize("name", PAIRS)
def test_no_step_is_shorter_than_simulated(ranks, name):
    """A real step is never shorter than simulated, on any machine, so the runner skips nothing and
    the simulation counts nothing twice."""
    measured, simulated, _ = measure(ranks, name, PAIRS[name][0], 8, seconds=0.002)
    assert measured > 0.999 * simulated


@pytest.mark.slow  # needs an otherwise idle machine
def test_steps_are_as_long_as_simulated_and_bubbles_in_order(ranks):
    bubbles = {}
    for name in PAIRS:
        measured, simulated, bubbles[name] = measure(ranks, name, PAIRS[name][0], 8, seconds=0.12)
        assert measured == pytest.approx(simulated, rel=0.05), name
    in_order = [bubbles[name] for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")]
    assert in_order == sorted(in_order, reverse=True)
