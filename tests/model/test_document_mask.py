"""data.document_mask: a window of packed documents gives the same result as its documents computed
separately.

On a GPU, flash attention processes the packed documents (gpu/test_runs.py). Without one, plain
kernels (flash.py) replace its kernels, here and in test_context_flash.py.
"""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import training.step
from costs.summary import flops_per_token
from data.config import DataConfig
from data.dataset import open_data
from data.loader import BatchLoader
from errors import UserError
from model.documents import find_documents
from model.initialise import initialise
from model.mask import Mask, scores_bias
from model.transformer import Batch, Transformer
from parallel.axes import MeshSizes
from parallel.layer import TensorParallel
from parallel.mesh import build_mesh
from proofs.parity.cases import BOS, Case
from proofs.parity.run import check
from runtime.metrics.metrics import Metrics
from settings.load import load_config
from tests import runs
from tests.data_samples import prepared, tokenizer, write
from tests.kernels.flash import flash_attention_stands_in
from tests.planted import planted

S = 12
WINDOWS = {  # where bos is in each sequence
    "no bos": [[]],
    "bos first": [[0]],
    "bos last": [[S - 1]],
    "consecutive": [[2, 3, 4, 8]],
    "nothing but bos": [range(S)],
    "two sequences": [[3, 8], [0, 6, S - 1]],
}


def window(name):
    """Tokens [B, S] with bos where WINDOWS has it, all other tokens distinct."""
    tokens = torch.arange(10, 10 + S * len(WINDOWS[name])).view(-1, S)
    for row, places in zip(tokens, WINDOWS[name], strict=True):
        row[[*places]] = BOS
    return tokens


def documents_of(row):
    """(begin, end) of each document in a row of tokens, found one token at a time by the
    definition."""
    begins = [0] + [i for i, token in enumerate(row.tolist()) if token == BOS and i > 0]
    return list(zip(begins, [*begins[1:], len(row)], strict=True))


# --- the model ------------------------------------------------------------------------------------


def packed(tokens):
    positions, documents = find_documents(tokens, BOS, "cpu", [range(S)])
    return Batch(tokens.T.contiguous(), None, positions, documents=documents)


def plain(tokens):
    return Batch(tokens.T.contiguous(), None, torch.arange(tokens.shape[1]).unsqueeze(1))


def result(model, outputs):
    """These logits, and parameter name → gradient of a weighted sum of them."""
    model.zero_grad()
    torch.manual_seed(1)
    (outputs * torch.randn(outputs.shape, dtype=outputs.dtype)).sum().backward()
    gradients = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    return outputs.detach(), gradients


def packed_alone_and_plain():
    """Logits [S, B, V] and gradients of an unsharded Transformer for every window, computed three
    ways: packed, each document separately, and with every sequence as one document."""
    config = Case(MeshSizes(), num_kv_heads=2).config().model
    tp = TensorParallel.of(build_mesh(MeshSizes(), "cpu"), sequence_parallel=False)
    model = Transformer(config, range(config.num_layers), True, True, tp).to(torch.float64)
    model.to_empty(device="cpu")
    initialise(model, seed=0)
    found = {}
    for name in WINDOWS:
        tokens = window(name)
        alone = [
            torch.cat([model(None, plain(row[a:b].unsqueeze(0))) for a, b in documents_of(row)])
            for row in tokens
        ]
        computed = model(None, packed(tokens)), torch.cat(alone, dim=1), model(None, plain(tokens))
        found[name] = [result(model, outputs) for outputs in computed]
    return found


def far(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_a_packed_window_is_its_documents_alone(ranks):
    (found,) = ranks.run(packed_alone_and_plain, 1)
    for name, (ours, alone, unmasked) in found.items():
        assert far(ours[0], alone[0]) < 1e-12, name
        for parameter, gradient in alone[1].items():
            # With documents of one token each, queries and keys have no gradient.
            if gradient.norm() > 1e-12:
                assert far(ours[1][parameter], gradient) < 1e-12, (name, parameter)
            else:
                assert name == "nothing but bos"
                assert ours[1][parameter].norm() < 1e-12, parameter
        # Control: with several documents, a causal mask without documents gives another result.
        # (Not if all tokens are equal, as any weighted mean of equal values is the same.)
        embeddings = (each[1]["embedding.weight"] for each in (unmasked, alone))
        distances = [far(unmasked[0], alone[0]), far(*embeddings)]
        if name in ("no bos", "bos first"):
            assert max(distances) < 1e-12, name
        elif name != "nothing but bos":
            assert min(distances) > 1e-3, name


# --- every layout ---------------------------------------------------------------------------------


@planted(training.step, "find_documents")
def documents_forgotten(_, tokens, *about):
    """The training step treats every sequence as one document."""
    return plain(tokens).positions, None


def test_forgotten_documents_are_found(ranks):
    case = Case(MeshSizes(pp=2, tp=2), document_mask=True)
    row = check(ranks, case, sabotage=documents_forgotten)
    assert {"loss", "gradient", "norm"} <= set(row.failures()), row.crash


# --- flash attention's bookkeeping ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("begins", "part", "longest"),
    [
        ([0, 1000, 1100, 2000], range(4096), (4096, 4096)),  # 2,096 tokens: the sequence
        ([*range(0, 4096, 7)], range(4096), (128, 128)),
        ([0, 1700, 3000], range(2048, 4096), (2048, 2048)),  # 952 of 1,300, and 1,096
        ([0, 2200, 2300, *range(2400, 4096, 100)], range(2048, 4096), (256, 4096)),
    ],
)
def test_the_longest_document_is_rounded_up(begins, part, longest):
    """A document that began before the part has few queries in it, and all its keys."""
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    tokens[:, begins] = BOS
    _, (documents,) = find_documents(tokens, BOS, "cpu", [part])
    assert documents.longest == longest
    _, (documents_,) = find_documents(tokens, BOS, "cpu", [part], compiled=True)
    assert documents_.longest == (len(part), part.stop)
    for bounds, at_most in zip(documents[:2], longest, strict=True):
        assert bounds.diff().max() <= at_most


def test_another_number_of_documents_compiles_no_more_than_once_again():
    """Nor does another length of the longest."""

    def run(q, k, v, documents):
        return Mask(True, documents)(q, k, v)

    compiler = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    q, k, v = (torch.randn(S, 1, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    with flash_attention_stands_in():
        for more, name in enumerate(("consecutive", "bos last", "no bos", "nothing but bos")):
            positions, (documents,) = find_documents(window(name), BOS, "cpu", [range(S)])
            longest = S + more, S + more
            y = compiled(q, k, v, documents._replace(longest=longest))
            y.sum().backward()
            masked = Mask(bias=scores_bias(positions, q.dtype))(q, k, v)
            assert torch.allclose(y, masked, atol=1e-5)
    assert compiler.frame_count <= 2


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos_id", [-1, None])
def test_data_without_bos_is_refused(tmp_path: Path, bos_id: int | None):
    data = prepared(tmp_path / "data")
    config = DataConfig(path=str(data), document_mask=True)
    assert open_data(config, "train").bos_id == tokenizer().bos_id
    index = json.loads((data / "index.json").read_text())
    (data / "index.json").write_text(json.dumps(index | {"bos_id": bos_id}))
    with pytest.raises(UserError, match=r"^data\.document_mask = True.*bos") as refusal:
        open_data(config, "train")
    assert "data.document_mask=false" in str(refusal.value)
    open_data(DataConfig(path=str(data)), "train")  # without the mask no bos is needed


# --- mfu ------------------------------------------------------------------------------------------


PEAK = 1e12  # FLOP/s, of a device


def train_with_peak(arguments: list[str]) -> str:
    begins = Metrics.begins

    def knows_peak(self, run):
        self.peak_flops = PEAK
        begins(self, run)

    with patch.object(Metrics, "begins", knows_peak):
        return runs.train_run(arguments)


def test_mfu_counts_attention_inside_documents(ranks, tmp_path):
    """Of the rows of all ranks, in all steps since the last logged one."""
    short = [json.dumps({"text": "word " * (i % 30)}) for i in range(200)]
    write(tmp_path, {"short.jsonl": "\n".join(short)})
    data = prepared(tmp_path / "data", str(tmp_path / "short.jsonl"), heldout_fraction=0.0)
    sections = {"data": {"document_mask": True}, "run": {"log_interval": 2}}
    train = {"steps": 3, "eval_interval": 0}
    path = runs.write_config(tmp_path, data, train=train, **sections)
    assert ranks.run(train_with_peak, 2, [path]) == [""] * 2
    config = load_config(path, [])
    loader = BatchLoader(
        open_data(config.data, "train"),
        seq_len=32, global_batch_size=8, seed=config.train.seed, dp_rank=0, dp_size=1,
    )  # fmt: skip
    flops = []  # per token, of each step
    for _ in range(3):
        lengths = [end - begin for each in next(loader)[0] for begin, end in documents_of(each)]
        mean = sum(length**2 for length in lengths) / sum(lengths)
        flops.append(flops_per_token(config.model, 32, document=mean))
    loader.close()
    assert max(flops) < flops_per_token(config.model, 32)
    first, second = (
        line["mfu"] * PEAK / line["tokens_per_second_per_device"]
        for line in runs.metrics_of(tmp_path)
    )
    assert first == pytest.approx((flops[0] + flops[1]) / 2, rel=1e-12)
    assert second == pytest.approx(flops[2], rel=1e-12)
