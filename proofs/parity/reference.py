"""A plain, unsharded implementation of the model, which the parallel one must equal.

It is deliberately a second implementation, written from the papers with nothing but torch: of the
code under test it reads only the section `model` of the configuration. Layers are `nn.Linear` and
`nn.Embedding`, the batch comes first, [B, S, D], and AdamW is torch's own (reference_adamw.py).
Each kind of layer, router and optimizer is a file, reference_KIND.py. Parameter names are
the same, so that gradients can be compared by name. `proofs/parity` compares the two.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from errors import UserError
from kinds import kinds_in, load_kind
from model.config import ModelConfig

IGNORE = -100  # F.cross_entropy's default


class Norm(nn.Module):
    """RMSNorm, written out."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x * x).mean(dim=-1, keepdim=True).add(self.eps).sqrt() * self.weight


# The class of a kind's reference, by the key of the section `model` that selects the kind.
NAMES = {
    "model.attention": "class Attention",
    "model.feed_forward": "class FeedForward",
    "model.router": "class Router",
    "optimizer.name": "function make",
}


def has_reference(kind: str) -> bool:
    return f"reference_{kind}" in kinds_in("proofs.parity")


def reference_of(key: str, kind: str) -> Any:
    """The class in reference_KIND.py. It is constructed with the section `model`; a layer maps
    x [B, S, D] to the same shape. Of an optimizer, the function from parameters by name, and the
    section `optimizer`, to torch's optimizers.

    Raises UserError if there is no such file."""
    name, (what, of_kind) = f"reference_{kind}", NAMES[key].split()
    if not has_reference(kind):
        remedy = f"write proofs/parity/{name}.py, with a {what} {of_kind}"
        raise UserError(key, kind, "there is no reference to compare it with", remedy)
    return load_kind("proofs.parity", name, of_kind)


def keys_to_try(key: str, kind: str) -> tuple[tuple[str, object], ...]:
    """The keys of the section `model`, with values, with which the proof tries a kind: `keys` of
    its reference's class, not those of a base."""
    own: tuple[tuple[str, object], ...] = vars(reference_of(f"model.{key}", kind)).get("keys", ())
    return own


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config.dim, config.norm_eps)
        attention, feed_forward = config.attention_of(layer), config.feed_forward_of(layer)
        self.attention = reference_of("model.attention", attention)(config)
        self.feed_forward_norm = Norm(config.dim, config.norm_eps)
        self.feed_forward = reference_of("model.feed_forward", feed_forward)(config)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """x [B, S, D]; `lengths` of the documents, sequence after sequence."""
        # Each document is a row, padded at its end. That changes nothing, because no position
        # attends to a later one.
        documents = self.attention_norm(x).flatten(0, 1).split(lengths)
        y = self.attention(pad_sequence(documents, batch_first=True))
        y = torch.cat([row[:length] for row, length in zip(y, lengths, strict=True)])
        x = x + y.view_as(x)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Reference(nn.Module):
    """The whole decoder: tokens [B, S] → logits [B, S, V].

    Args:
        bos_id: the token that begins a document; tokens then attend only to their own document.
    """

    def __init__(self, config: ModelConfig, bos_id: int | None = None) -> None:
        super().__init__()
        self.bos_id = bos_id
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            # one Parameter, which `named_parameters` yields once, as embedding.weight
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        begins = torch.zeros_like(tokens) if self.bos_id is None else tokens == self.bos_id
        begins[:, 0] = True
        starts = begins.flatten().nonzero().flatten()
        lengths = starts.diff(append=torch.tensor([tokens.numel()])).tolist()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, lengths)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not ignored."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
