"""The kinds of routers at the limits of their numbers, and beside DeepSeek's.

test_parity.py compares every kind, its scale, biases and losses of each sequence with a reference
in whole steps, test_controls.py shows that it would notice, and test_huggingface.py compares the
routers of published models with those of transformers.
"""

from dataclasses import replace
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.experts import Experts
from model.router import BaseRouter, router_class
from parallel.expert import ExpertParallel
from parallel.kept import KeptOutputs
from parallel.layer import TensorParallel

S, B, D, X, K = 6, 3, 8, 5, 2
CONFIG = ModelConfig(
    dim=D, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=8, vocab_size=8,
    experts=Experts(count=X, per_token=K, ffn_dim=8, router_aux_weight=0.5,
                    router_z_weight=0.25),
)  # fmt: skip
DELTA = Decimal("1e-30")  # of a central difference, computed with 100 digits
KINDS = ["softmax", "softmax_renormalised", "sigmoid_bias"]


def router_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> BaseRouter:
    torch.manual_seed(0)
    kind = router_class(config.router)
    router = kind(config, TensorParallel(), ExpertParallel(), KeptOutputs())
    router = router.to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        router.weight.normal_()
    return router


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(S, B, D, generator=generator, dtype=torch.float64).to(dtype)


def routed(router: BaseRouter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and chosen experts of each token."""
    choice, _ = router(x)
    return choice.weights, choice.experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "logits",
    [[-90] * X, [-200, -201, -198, -202, -203], [1e4] * X, [1e4, -1e4, 0, 9999, -9999],
     [-1e4, -9999, -9998, -9997, -9996], [0.5, -0.25, 2, -3, 1]],
    ids=str,
)  # fmt: skip
def test_weights_losses_and_gradients_are_right_for_all_finite_logits(kind, logits, dtype):
    """Of one token, beside the formulas in decimal arithmetic, whose exponents have no limit. (The
    sigmoid of -90 is 0 in float32, that of -1e4 in float64.)"""
    router = router_of(replace(CONFIG, router=kind), dtype)
    with torch.no_grad():
        router.weight.zero_()[:, 0] = torch.tensor(logits)
    x = torch.zeros(1, 1, D, dtype=dtype)
    x[..., 0] = 1
    load = router.start_to_count("cpu", dtype, global_sequences=1)
    weights, chosen = routed(router, x)
    (weights * torch.tensor([[1.0, 3.0]], dtype=dtype)).sum().backward()

    point = [Decimal(logit) for logit in logits]
    chosen = chosen[0].tolist()

    def exact(z: list[Decimal]) -> list[Decimal]:
        """The weights of the chosen experts, the balance loss and the z-loss."""
        p = [value.exp() for value in z]
        z_loss = sum(p).ln() ** 2 / 4
        if kind == "sigmoid_bias":
            p = [1 / (1 + (-value).exp()) for value in z]
        balance = sum(p[e] * X for e in chosen) / sum(p) / K / 2
        whole = sum(p) if kind == "softmax" else sum(p[e] for e in chosen)
        return [*(p[e] / whole for e in chosen), balance, z_loss]

    def slope(e: int) -> Decimal:
        """The derivative, by the logit of expert e, of what the router differentiates."""
        up, down = (exact([*point[:e], point[e] + h, *point[e + 1 :]]) for h in (DELTA, -DELTA))
        parts = zip((1, 3, 1, 1), up, down, strict=True)
        return sum(factor * (a - b) for factor, a, b in parts) / (2 * DELTA)

    def check(found: Tensor, right: list[Decimal], error: float) -> None:
        error *= torch.finfo(dtype).eps
        expected = torch.tensor([float(value) for value in right], dtype=dtype)
        torch.testing.assert_close(found, expected, rtol=error, atol=error)

    with localcontext(prec=100):
        check(torch.cat([weights[0], load.losses]), exact(point), 40)
        # that of logsumexp is exp(logit - logsumexp), rounded like a logit
        check(router.weight.grad[:, 0], [*map(slope, range(X))], 40 + max(map(abs, logits)))


def test_sigmoid_bias_is_the_router_of_deepseek_v3_in_transformers():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Config,
        DeepseekV3TopkRouter,
    )

    config = DeepseekV3Config(
        hidden_size=D, n_routed_experts=X, num_experts_per_tok=K, n_group=1, topk_group=1,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    other, x = DeepseekV3TopkRouter(config), 5 * tokens(torch.float32)
    scaled = replace(CONFIG.experts, router_scale=2.5)
    config = replace(CONFIG, router="sigmoid_bias", experts=scaled)
    router = router_of(config, torch.float32)
    router.set_bias(torch.tensor([0.5, -0.5, 0.0, 0.3, -9.0]))
    other.weight, other.e_score_correction_bias = router.weight, router.bias

    def spread(weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """[T, X]: the weights at their experts; and the gradient of a sum with fixed factors."""
        spread = torch.zeros(S * B, X).scatter(1, chosen, weights)
        return spread, torch.autograd.grad((spread * torch.arange(X)).sum(), router.weight)[0]

    ours, theirs = spread(*routed(router, x)), spread(*other(x.flatten(0, 1))[1:])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_experts_that_bfloat16_cannot_tell_apart_are_told_apart():
    """Two logits, 256 and 256.5: in bfloat16 they are equal. Weights are float32 too."""
    one = replace(CONFIG.experts, per_token=1)
    router = router_of(replace(CONFIG, experts=one, router="softmax"), torch.bfloat16)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[1, :2] = torch.tensor([256.0, 0.0])
        router.weight[3, :2] = torch.tensor([256.0, 0.5])
    x = torch.zeros(S, B, D, dtype=torch.bfloat16)
    x[..., :2] = 1
    weights, chosen = routed(router, x)
    assert (chosen == 3).all()
    assert weights.dtype == torch.float32


def test_equal_scores_choose_the_same_experts_in_any_company():
    """A token's choice among equal experts must not depend on which other tokens a rank has."""
    router = router_of(CONFIG)
    with torch.no_grad():
        router.weight.zero_()
    x = tokens()
    _, together = routed(router, x)
    alone = [routed(router, x[s : s + 1, b : b + 1])[1] for s in range(S) for b in range(B)]
    assert torch.equal(together, torch.cat(alone))


def test_evaluation_is_not_counted():
    router = router_of(CONFIG)
    load = router.start_to_count("cpu", torch.float64, B)
    with torch.no_grad():
        routed(router, tokens())
    assert not load.counts.any()
    assert not load.losses.any()
