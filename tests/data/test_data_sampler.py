"""Sample i of a run is a pure function of (seed, i): each epoch is a permutation of the windows,
and mixtures keep exact quotas."""

from itertools import product

import numpy as np
import pytest

from data.sampler import (
    MIXTURE_PERIOD,
    Permutation,
    SampleOrder,
    count_windows,
    merge_ranges,
    mixture_pattern,
    next_samples,
)
from errors import UserError


def test_permutation_is_a_bijection_chosen_by_its_key() -> None:
    for n in [*range(1, 40), 100, 101, 255, 256, 257, 1009, 65536, 99_991]:
        one, other = (Permutation(n, key)(np.arange(n)) for key in ("a", "b"))
        assert np.array_equal(np.sort(one), np.arange(n))
        assert np.array_equal(np.sort(other), np.arange(n))
        assert n < 1000 or np.mean(one == other) < 0.02
        # The image of a point does not depend on the other points.
        some = np.array([n // 2, 0, 0])
        assert np.array_equal(one[some], Permutation(n, "a")(some))


@pytest.mark.parametrize("n", [10**12 + 39, 2**61 + 1])
def test_permutation_of_huge_ranges_stays_inside_and_does_not_collide(n: int) -> None:
    points = np.concatenate([np.arange(50_000), np.arange(n - 50_000, n)])
    images = Permutation(n, "huge")(points)
    assert len(np.unique(images)) == len(points)
    assert images.max() < n
    # The images spread over the whole range: each tenth gets a tenth of them (binomial: 10,000 with
    # sigma 95).
    tenths = np.bincount((images // np.uint64(-(-n // 10))).astype(int), minlength=10)
    assert np.all(np.abs(tenths - 10_000) < 600)
    # Neighbours do not stay neighbours.
    assert abs(np.corrcoef(images[:-1].astype(float), images[1:].astype(float))[0, 1]) < 0.02


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.29, 0.01, 0.7], [5, 3, 2, 1e-3], [1e-5, 1.0]])
def test_mixture_quotas_are_exact_and_even(weights: list[float]) -> None:
    source_of, rank_of, quota = mixture_pattern(weights)
    shares = np.array(weights) / sum(weights)
    assert quota.sum() == len(source_of) == MIXTURE_PERIOD
    assert np.all(np.abs(quota - shares * MIXTURE_PERIOD) < 1)
    if 0.29 in weights:  # round ones are exact
        assert quota.tolist() == [29_000, 1_000, 70_000]
    positions = np.arange(1, MIXTURE_PERIOD + 1)
    for s in range(len(weights)):
        mine = source_of == s
        # its samples are in order and complete
        assert np.array_equal(rank_of[mine], np.arange(quota[s]))
        drift = np.cumsum(mine) - positions * quota[s] / MIXTURE_PERIOD
        # at every position the mixture has its shares, within a few samples
        assert np.abs(drift).max() <= len(weights)


def test_a_weight_too_small_to_be_read_is_refused() -> None:
    with pytest.raises(UserError):
        mixture_pattern([1.0, 1e-9])


def test_sample_order_counts_each_source_across_periods() -> None:
    order = SampleOrder([10**9, 10**9], [0.7, 0.3], seed=0, shuffle=False)
    many = np.arange(MIXTURE_PERIOD * 2 + 12_345)
    source, epoch, window = order.locate(many)
    for s in (0, 1):  # unshuffled: the k-th sample of a source is its window k
        assert np.array_equal(window[source == s], np.arange((source == s).sum()))
    assert not epoch.any()
    # far from the beginning, and without the samples before
    source, epoch, window = order.locate(np.arange(10**12, 10**12 + 1000))
    nth = epoch * 10**9 + window
    assert abs(int(nth[source == 0][0]) - 7 * 10**11) <= 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_window_once_per_epoch(shuffle: bool) -> None:
    windows = [37, 11]
    order = SampleOrder(windows, [0.6, 0.4], seed=3, shuffle=shuffle)
    source, epoch, window = order.locate(np.arange(600))
    for s in (0, 1):
        for e in range(int(epoch[source == s].max())):  # the complete ones
            assert sorted(window[(source == s) & (epoch == e)]) == list(range(windows[s]))


def test_epochs_seeds_and_sources_are_shuffled_apart() -> None:
    def first_epochs(seed: int) -> list[tuple]:
        order = SampleOrder([50, 50], [1, 1], seed=seed, shuffle=True)
        source, epoch, window = order.locate(np.arange(200))
        return [tuple(window[(source == s) & (epoch == e)]) for s in (0, 1) for e in (0, 1)]

    assert len({*first_epochs(0), *first_epochs(1)}) == 8
    assert first_epochs(0) == first_epochs(0)


def test_no_token_is_a_target_twice() -> None:
    for num_tokens, seq_len in product([0, 1, 2, 8, 128, 129, 130, 1025], [1, 7, 128]):
        count = count_windows(num_tokens, seq_len)
        targets = [w * seq_len + 1 + i for w in range(count) for i in range(seq_len)]
        assert targets == list(range(1, len(targets) + 1))
        assert 0 <= max(num_tokens - 1, 0) - len(targets) < seq_len


def test_next_samples_steps_over_skipped_ranges() -> None:
    skipped = merge_ranges([[10, 20], [15, 25], [25, 30], [26, 28], [3, 3], [40, 41]])
    assert skipped == ((10, 30), (40, 41))
    allowed = [i for i in range(200) if i not in range(10, 30) and i != 40]
    for size in (1, 3, 8, 50):
        position, seen = 0, []
        while len(seen) < 100:
            samples, position = next_samples(position, size, skipped)
            assert len(samples) == size
            seen += samples.tolist()
        assert seen == allowed[: len(seen)]
