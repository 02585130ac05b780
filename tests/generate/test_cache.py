"""Generation with the key/value cache writes the same tokens as without, in any batch and on any
number of ranks."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from model.config import ModelConfig
from model.initialise import initialise
from model.positions import Angles
from tests.huggingface.huggingface_models import recompute
from tests.planted import planted
from tests.proofs.parity_tiers import thorough_but
from tools.generate import loop
from tools.generate.cache import KeyValueCache, LayerCache
from tools.generate.load_model import empty_model
from tools.generate.sampling import Sampling, draw

GREEDY = Sampling(temperature=0)
LONG = 60  # tokens
# The weights are large enough that greedy text does not repeat itself, and no tp divides the
# vocabulary.
SMALL = ModelConfig(
    dim=32, num_layers=2, num_heads=8, num_kv_heads=4, ffn_dim=48, vocab_size=251, init_std=0.4,
    rope_theta=1e4,
)  # fmt: skip
MODELS = {
    "one key/value head": replace(SMALL, num_kv_heads=1),
    "windows": replace(SMALL, attention=("sliding_window", "causal"), sliding_window={"window": 7}),
    "every switch": replace(SMALL, attention_dim=64, qk_norm=True, rope_scaling_factor=8.0,
                            rope_original_length=32),
}  # fmt: skip
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [100, 200, 250, 0, 17], [8, 8]]


def build(config, dtype=torch.float64):
    model = empty_model(config, dtype, "cpu")
    initialise(model, seed=1)
    return model


def rows_of(model, prompts, count, sampling=GREEDY, stop=(), first_row=0):
    """The new tokens for each prompt."""
    rows = [[] for _ in prompts]
    for new in loop.generate(model, prompts, count, sampling, stop, first_row):
        for row, token in zip(rows, new, strict=True):
            row += [] if token is None else [token]
    return rows


# --- the cache ------------------------------------------------------------------------------------


@torch.no_grad()
def cached_logits(model, prompt, following):
    """Logits [1 + len(following), V] after the prompt and after each token of `following`, with the
    cache."""
    dtype, device = model.norm.weight.dtype, torch.device("cpu")
    cache = KeyValueCache([len(prompt)], len(following), dtype, device)
    steps = [torch.tensor(prompt).unsqueeze(1), *torch.tensor(following).view(-1, 1, 1)]
    return torch.stack([loop.next_logits(model, tokens, cache)[0, 0] for tokens in steps])


@planted(KeyValueCache, "angles")
def turned_by_the_next_position(angles, self, rotary):
    """Every token after the prompt is rotated by the angle of the next position."""
    found = angles(self, rotary)
    after = slice(self.filled + 1, self.filled + 2)
    one_further = [each[after] for each in self._angles[rotary]]
    return Angles(*one_further) if self.filled and len(one_further[0]) else found


@planted(LayerCache, "append")
def last_slot_forgotten(append, self, k, v):
    """Each token's keys overwrite those of the token before, which becomes invisible."""
    self.filled -= self.filled > 3
    return append(self, k, v)


@planted(LayerCache, "append")
def keys_without_values(append, self, k, v):
    """From position 20 on, the cached values are zero."""
    return append(self, k, v if self.filled < 20 else torch.zeros_like(v))


def cache_error(config, dtype, sabotage=nullcontext):
    """Compare greedy tokens with and without the cache. Returns the number of tokens that
    differ, the largest relative error of the logits, and the number of distinct tokens."""
    model, prompt = build(config, dtype), PROMPTS[1]
    expected, without = recompute(model, prompt, LONG)
    with sabotage():
        (found,) = rows_of(model, [prompt], LONG)
        logits = cached_logits(model, prompt, expected[:-1])
    different = sum(a != b for a, b in zip(found, expected, strict=True))
    error = (logits - without).abs().max() / without.abs().max()
    return different, error.item(), len(set(expected))


@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [*((name, torch.float64, 1e-12) for name in MODELS), ("windows", torch.float32, 1e-5)],
    ids=[*MODELS, "float32"],
)
def test_with_the_cache_as_without(ranks, name, dtype, bound):
    ((different, error, kinds),) = ranks.run(cache_error, 1, MODELS[name], dtype)
    assert different == 0
    assert error < bound
    assert kinds > 20, "a text that repeats one word proves little"


@pytest.mark.parametrize(
    "sabotage", [turned_by_the_next_position, last_slot_forgotten, keys_without_values]
)
def test_a_planted_error_of_the_cache_is_found(ranks, sabotage):
    ((different, error, _),) = ranks.run(cache_error, 1, SMALL, torch.float64, sabotage)
    assert different > 0
    assert error > 1e-3


# --- a batch --------------------------------------------------------------------------------------


@planted(KeyValueCache, "__init__")
def padding_seen(build, self, *arguments):
    """Shorter prompts of a batch attend to their padding."""
    build(self, *arguments)
    self._has_padding = False


def batch_against_alone(sampling, sabotage=nullcontext):
    """The rows of a batch; each by itself; and those of a batch that ends at a token of row 0."""
    model, count = build(SMALL), 30
    with sabotage():
        together = rows_of(model, PROMPTS, count, sampling, first_row=5)
    alone = [rows_of(model, [p], count, sampling, first_row=5 + i) for i, p in enumerate(PROMPTS)]
    cut = rows_of(model, PROMPTS, count, sampling, {together[0][4]}, first_row=5)
    return together, [row for (row,) in alone], cut


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(1.0, top_k=50, top_p=0.9, seed=3)], ids=["greedy", "drawn"]
)
def test_a_row_is_what_it_is_alone(ranks, sampling):
    """It ends before its stop token, and the others go on."""
    ((together, alone, cut),) = ranks.run(batch_against_alone, 1, sampling)
    assert together == alone
    assert all(len(row) == 30 for row in alone)
    token = together[0][4]
    assert cut == [row[: row.index(token)] if token in row else row for row in together]
    assert len({len(row) for row in cut}) > 1


def test_padding_that_is_seen_is_found(ranks):
    ((together, alone, _),) = ranks.run(batch_against_alone, 1, GREEDY, padding_seen)
    # row 1, the longest prompt, has no padding
    found = [row != other for row, other in zip(together, alone, strict=True)]
    assert found == [True, False, True, True]


# --- tensor parallelism ---------------------------------------------------------------------------


@planted(loop, "draw_over_tp")
def each_draws_from_its_own_part(_, logits, head, sampling, numbers, *about):
    """Each tp rank draws from its own part of the vocabulary."""
    return draw(logits, sampling, numbers)


def drawn_on_each_rank(config, sampling, sabotage=nullcontext):
    with sabotage():
        return rows_of(build(config), PROMPTS, 25, sampling)


@pytest.mark.parametrize(
    ("kv", "tp", "temperature"), thorough_but({(4, 2, 1)}, [(4, 2, 1), (1, 2, 0), (2, 4, 1)])
)
def test_ranks_together_write_what_one_does(ranks, kv, tp, temperature):
    config, sampling = replace(SMALL, num_kv_heads=kv), Sampling(temperature, top_p=0.9, seed=3)
    (expected,) = ranks.run(drawn_on_each_rank, 1, config, sampling)
    assert ranks.run(drawn_on_each_rank, tp, config, sampling) == [expected] * tp


def test_a_rank_that_draws_alone_is_found(ranks):
    (expected,) = ranks.run(drawn_on_each_rank, 1, SMALL, GREEDY)
    found = ranks.run(drawn_on_each_rank, 2, SMALL, GREEDY, each_draws_from_its_own_part)
    assert found != [expected] * 2
