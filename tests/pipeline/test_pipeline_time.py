"""The pipeline runner takes as long as the simulator predicts: on four ranks over gloo, with
actions that wait instead of computing."""

import pytest

from benchmarks.pipeline_schedules import PAIRS, Case, compare
from tests.proofs.parity_tiers import thorough_but


@pytest.mark.parametrize("name", thorough_but(["1f1b", "interleaved_1f1b", "zb_v"], PAIRS))
def test_no_step_is_shorter_than_simulated(ranks, name):
    """A real step is never shorter than simulated, on any machine, so the runner skips nothing and
    the simulation counts nothing twice."""
    found = compare(ranks, Case(name, seconds=0.002), rounds=1, beside=False)
    assert found["measured_over_simulated"] > 0.999


@pytest.mark.slow  # needs an otherwise idle machine
def test_steps_are_as_long_as_simulated_and_bubbles_in_order(ranks):
    bubbles = {}
    for name in PAIRS:
        found = compare(ranks, Case(name, seconds=0.12), rounds=3, beside=False)
        assert found["measured_over_simulated"] == pytest.approx(1, rel=0.05), name
        bubbles[name] = found["measured_bubble_fraction"]
    in_order = [bubbles[name] for name in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")]
    assert in_order == sorted(in_order, reverse=True)
