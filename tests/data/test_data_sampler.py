"""Sample i of a run is a pure function of (seed, i): each epoch is a permutation of the windows,
and mixtures keep exact quotas."""

from collections import Counter

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

SIZES = [*range(1, 70), 97, 100, 101, 255, 256, 257, 1009, 4096, 65535, 65536, 65537, 99_991]


@pytest.mark.parametrize("n", SIZES)
def test_permutation_is_a_bijection(n: int) -> None:
    for key in ("a", "b"):
        assert np.array_equal(np.sort(Permutation(n, key)(np.arange(n))), np.arange(n))


def test_permutation_depends_on_the_key_only() -> None:
    points = np.arange(1000)
    one, again, other = (
        Permutation(1000, "k")(points),
        Permutation(1000, "k")(points),
        Permutation(1000, "l")(points),
    )
    assert np.array_equal(one, again)
    assert np.mean(one == other) < 0.02
    # The image of a point does not depend on the other points.
    assert np.array_equal(one[[7, 3, 3]], Permutation(1000, "k")(np.array([7, 3, 3])))


@pytest.mark.parametrize("n", [10**12, 10**12 + 39, 2**61 + 1])
def test_permutation_of_huge_ranges_stays_inside_and_does_not_collide(n: int) -> None:
    points = np.concatenate([np.arange(50_000), np.arange(n - 50_000, n)])
    images = Permutation(n, "huge")(points)
    assert len(np.unique(images)) == len(points)
    assert images.max() < n
    # The images spread over the whole range: each tenth gets a tenth of them (binomial: 10,000 with
    # sigma 95).
    tenths = np.bincount((images // np.uint64(-(-n // 10))).astype(int), minlength=10)
    assert np.all(np.abs(tenths - 10_000) < 600)


def test_permutation_looks_random() -> None:
    """Over many keys every point is mapped to every image equally often, and neighbours do not stay
    neighbours."""
    counts = np.zeros((6, 6))
    for key in range(6000):
        counts[np.arange(6), Permutation(6, str(key))(np.arange(6)).astype(int)] += 1
    assert np.all(np.abs(counts - 1000) < 150)  # 5 sigma
    images = Permutation(100_000, "x")(np.arange(100_000)).astype(float)
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(images, np.arange(100_000))[0, 1]) < 0.02


def test_permutation_refuses_points_outside() -> None:
    with pytest.raises(ValueError, match="point 10"):
        Permutation(10, "k")(np.array([10]))


@pytest.mark.parametrize(
    "weights",
    [[1], [0.7, 0.3], [1, 1, 1], [0.29, 0.01, 0.7], [5, 3, 2, 1e-3], [1 / 3, 2 / 3], [1e-5, 1.0]],
)
def test_mixture_quotas_are_exact_and_even(weights: list[float]) -> None:
    source_of, rank_of, quota = mixture_pattern(weights)
    shares = np.array(weights) / sum(weights)
    assert quota.sum() == len(source_of) == MIXTURE_PERIOD
    assert np.all(np.abs(quota - shares * MIXTURE_PERIOD) < 1)
    positions = np.arange(1, MIXTURE_PERIOD + 1)
    for s in range(len(weights)):
        mine = source_of == s
        # its samples are in order and complete
        assert np.array_equal(rank_of[mine], np.arange(quota[s]))
        drift = np.cumsum(mine) - positions * quota[s] / MIXTURE_PERIOD
        # at every position the mixture has its shares, within a few samples
        assert np.abs(drift).max() <= len(weights)


def test_mixture_weights_that_are_round_are_exact() -> None:
    assert mixture_pattern([0.29, 0.01, 0.7])[2].tolist() == [29_000, 1_000, 70_000]


@pytest.mark.parametrize(
    "weights", [[], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf")], [1.0, 1e-9]]
)
def test_mixture_refuses(weights: list[float]) -> None:
    with pytest.raises(UserError):
        mixture_pattern(weights)


def test_sample_order_counts_each_source_across_periods() -> None:
    order = SampleOrder([10**9, 10**9], [0.7, 0.3], seed=0, shuffle=False)
    many = np.arange(MIXTURE_PERIOD * 2 + 12_345)
    source, epoch, window = order.locate(many)
    for s in (0, 1):  # unshuffled: the k-th sample of a source is its window k
        assert np.array_equal(window[source == s], np.arange((source == s).sum()))
    assert not epoch.any()
    far = 10**12 * MIXTURE_PERIOD // MIXTURE_PERIOD
    source, epoch, window = order.locate(np.arange(far, far + 1000))
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
        source, epoch, window = SampleOrder([50, 50], [1, 1], seed=seed, shuffle=True).locate(
            np.arange(200)
        )
        return [tuple(window[(source == s) & (epoch == e)]) for s in (0, 1) for e in (0, 1)]

    assert len({*first_epochs(0), *first_epochs(1)}) == 8
    assert first_epochs(0) == first_epochs(0)


def test_locate_is_pointwise() -> None:
    order = SampleOrder([1000, 70], [0.9, 0.1], seed=1, shuffle=True)
    together = np.stack(order.locate(np.arange(5000)), 1)
    generator = np.random.default_rng(0)
    picks = generator.integers(0, 5000, 300)
    assert np.array_equal(np.stack(order.locate(picks), 1), together[picks])


@pytest.mark.parametrize("seq_len", [1, 2, 7, 128])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 8, 128, 129, 130, 1000, 1025])
def test_no_token_is_a_target_twice(num_tokens: int, seq_len: int) -> None:
    targets = Counter()
    for w in range(count_windows(num_tokens, seq_len)):
        targets.update(range(w * seq_len + 1, w * seq_len + seq_len + 1))
    assert all(count == 1 for count in targets.values())
    left_out = max(num_tokens - 1, 0) - len(targets)
    assert 0 <= left_out < seq_len
    assert not targets or max(targets) < num_tokens


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
