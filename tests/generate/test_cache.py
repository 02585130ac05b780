"""Generation with the key/value cache writes the same tokens as without, on any number of ranks."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from model.config import ModelConfig
from model.initialise import initialise
from model.positions import Angles
from runtime.agreement import AgreedError
from tests.huggingface.huggingface_models import recompute
from tests.planted import planted
from tests.proofs.parity_tiers import thorough_but
from tools.generate import loop
from tools.generate.cache import KeyValueCache, LayerCache
from tools.generate.load_model import empty_model
from tools.generate.loop import Sampling, draw

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
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def build(config, dtype=torch.float64):
    model = empty_model(config, dtype, "cpu")
    initialise(model, seed=1)
    return model


def new_tokens(model, count, sampling=GREEDY, stop=(), prompt=PROMPT):
    return list(loop.generate(model, prompt, count, sampling, stop))


# --- the cache ------------------------------------------------------------------------------------


@torch.no_grad()
def cached_logits(model, prompt, following):
    """Logits [1 + len(following), V] after the prompt and after each token of `following`, with the
    cache."""
    length, dtype = len(prompt) + len(following), model.norm.weight.dtype
    cache = KeyValueCache(length, dtype, torch.device("cpu"))
    steps = [torch.tensor(prompt).unsqueeze(1), *torch.tensor(following).view(-1, 1, 1)]
    return torch.stack([loop.next_logits(model, tokens, cache)[0, 0] for tokens in steps])


@planted(KeyValueCache, "angles")
def turned_by_the_next_position(angles, self, rotary):
    """Every token after the prompt is rotated by the angle of the next position."""
    found, now = angles(self, rotary), self.current
    if now.start == 0 or now.stop == self.length:
        return found
    return Angles(*(each[now.stop : now.stop + 1] for each in self._angles[rotary]))


@planted(LayerCache, "append")
def first_token_forgotten(append, self, k, v):
    """A token after the prompt does not see the first of it."""
    keys, values = append(self, k, v)
    return (keys[1:], values[1:]) if self.whole.current.start else (keys, values)


@planted(LayerCache, "append")
def keys_without_values(append, self, k, v):
    """From position 20 on, the cached values are zero."""
    return append(self, k, v if self.whole.current.start < 20 else torch.zeros_like(v))


def cache_error(config, dtype, sabotage=nullcontext):
    """Compare greedy tokens with and without the cache. Returns the number of tokens that
    differ, the largest relative error of the logits, and the number of distinct tokens."""
    model = build(config, dtype)
    expected, without = recompute(model, PROMPT, LONG)
    with sabotage():
        found = new_tokens(model, LONG)
        logits = cached_logits(model, PROMPT, expected[:-1])
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
    "sabotage", [turned_by_the_next_position, first_token_forgotten, keys_without_values]
)
def test_a_planted_error_of_the_cache_is_found(ranks, sabotage):
    ((different, error, _),) = ranks.run(cache_error, 1, SMALL, torch.float64, sabotage)
    assert different > 0
    assert error > 1e-3


def cut_short():
    model, drawn = build(SMALL), Sampling(1.0, top_k=50, seed=3)
    whole = new_tokens(model, 30, drawn, prompt=[7])
    return whole, new_tokens(model, 30, drawn, {whole[9]}, [7]), new_tokens(model, 0)


def test_a_text_ends_before_its_stop_token(ranks):
    """A prompt of one token has a text of the length asked for."""
    ((whole, cut, none),) = ranks.run(cut_short, 1)
    assert len(whole) == 30
    assert cut == whole[: whole.index(whole[9])]
    assert none == []


class SumsOfEarlierTokens(torch.nn.Module):
    def inputs(self, positions):
        return ()

    def forward(self, x):
        return x.cumsum(0)


def without_attend():
    model = build(SMALL)
    model.blocks["1"].attention = SumsOfEarlierTokens()
    with pytest.raises(AgreedError, match=r"model\.attention = 'causal': is no BaseAttention"):
        new_tokens(model, 2)


def test_attention_that_the_cache_does_not_know_is_refused(ranks):
    """Its tokens would not see earlier ones."""
    ranks.run(without_attend, 1)


# --- tensor parallelism ---------------------------------------------------------------------------


@planted(loop, "draw_over_tp")
def each_draws_from_its_own_part(_, logits, head, sampling, numbers, *about):
    """Each tp rank draws from its own part of the vocabulary."""
    return draw(logits, sampling, numbers)


def drawn_on_each_rank(config, sampling, sabotage=nullcontext):
    with sabotage():
        return new_tokens(build(config), 25, sampling)


@pytest.mark.parametrize(
    ("kv", "tp", "temperature"), thorough_but({(4, 2, 1)}, [(4, 2, 1), (1, 2, 0), (2, 4, 1)])
)
def test_ranks_together_write_what_one_does(ranks, kv, tp, temperature):
    """Control: if each draws from its own part of the vocabulary, they do not."""
    config, sampling = replace(SMALL, num_kv_heads=kv), Sampling(temperature, seed=3)
    (expected,) = ranks.run(drawn_on_each_rank, 1, config, sampling)
    assert ranks.run(drawn_on_each_rank, tp, config, sampling) == [expected] * tp
    wrong = ranks.run(drawn_on_each_rank, tp, config, sampling, each_draws_from_its_own_part)
    assert wrong != [expected] * tp
