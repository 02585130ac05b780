"""Evaluation on tasks: the same log-likelihoods on every layout and by transformers, and what is
scored."""

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from data.dataset import TokenDataset
from errors import UserError
from model.kernels.backend import cdiv
from model.linear_cross_entropy import PIECE_BYTES
from parallel.axes import MeshSizes
from proofs.parity.cases import BOS, SEED, SEQ_LEN, Case
from proofs.parity.run import reference_model
from proofs.ranks import Ranks
from runtime.evaluation import scoring
from runtime.evaluation.rows import (
    BUNDLED,
    Example,
    Row,
    Task,
    read_tasks,
    results,
    tokenize,
)
from runtime.metrics.trackers import of_tasks
from settings.config import DTYPES
from tests import ROOT
from tests.data_samples import tokenizer
from tests.docs.transcripts import run_python
from tests.planted import planted
from tests.proofs.parity_tiers import strictly
from tests.runs import LAYOUT_3D, losses, metrics_of, run, write_config
from tests.steps import make_step
from tools import evaluate, export
from tools.report.page import page
from tools.report.run import read_run

# --- the same on every layout ---------------------------------------------------------------------

CASES = {
    "pp 2, tp 2": Case(MeshSizes(pp=2, tp=2), tp_pieces=2),
    "cp 2, dp_shard 2": Case(MeshSizes(cp=2, dp_shard=2), zero_stage=3),
    "pp 2, cp 2": Case(MeshSizes(pp=2, cp=2), schedule="zb_v", stages_per_rank=2),
    "ep 2, dp_replicate 2": Case(
        MeshSizes(dp_replicate=2, dp_shard=2, ep=2), router="sigmoid_bias"
    ),
    "tp 2, whole sequences": Case(MeshSizes(tp=2), sequence_parallel=False),
    "one rank": Case(MeshSizes(), document_mask=True),
}


def test_rows_are_computed_in_short_lengths():
    """A row is padded to a power of two times the ranks' cuts of a sequence, or to seq_len,
    whatever its factors."""
    rows = [Row(np.arange(n + 1), 1) for n in (128, 65, 64, 33, 5, 1)]
    assert scoring.lengths(rows, 128, 1) == {32: [4, 5], 64: [2, 3], 128: [0, 1]}
    assert scoring.lengths(rows, 128, 64) == {64: [2, 3, 4, 5], 128: [0, 1]}
    assert scoring.lengths(rows, 129, 1) == {32: [4, 5], 64: [2, 3], 128: [0, 1]}
    assert scoring.lengths(rows, 135, 3) == {48: [3, 4, 5], 96: [1, 2], 135: [0]}


def some_rows(vocab_size: int) -> list[Row]:
    """Rows of all lengths from 1 to SEQ_LEN inputs, with different numbers of scored tokens."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(21):
        inputs = number % SEQ_LEN + 1
        tokens = generator.integers(0, vocab_size, inputs + 1).astype(np.int32)
        tokens[0] = BOS
        rows.append(Row(tokens, generator.integers(1, inputs + 1)))
    return rows


def scored(
    case: Case, pieces: int | None = None, batches: float = math.inf
) -> tuple[list[float] | None, int]:
    """Score some rows on this rank, in pieces of so many tokens, until `batches` groups of
    micro-batches are done; return the largest number of tokens whose logits were computed at a
    time, too."""
    most, done = [0], count()

    @planted(scoring, "normaliser")
    def noted(honest: Any, logits: Tensor, *more: Any) -> Any:
        most[0] = max(most[0], len(logits))
        return honest(logits, *more)

    token_bytes = cdiv(case.vocab_size, case.layout.tp) * DTYPES[case.dtype].itemsize
    with (
        noted(),
        patch.object(scoring, "SHORTEST", 4),
        patch.dict(PIECE_BYTES, {"cpu": pieces * token_bytes} if pieces else {}),
    ):
        rows, step = some_rows(case.vocab_size), make_step(case)
        return scoring.score_on_mesh(step, rows, SEQ_LEN, lambda: next(done) < batches), most[0]


def expected(case: Case) -> list[float]:
    """Each row by itself, unpadded, by the plain implementation."""
    model = case.config().model
    reference = reference_model(model, DTYPES[case.dtype], SEED)
    found = []
    for row in some_rows(case.vocab_size):
        tokens = torch.from_numpy(row.tokens).long()
        logits: Tensor = reference(tokens[None, :-1])[0].log_softmax(-1)
        values = logits.gather(1, tokens[1:, None]).squeeze(1)
        found.append(values[-row.scored :].sum().item())
    return found


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> Callable[[str], list[tuple[list[float], int]]]:
    """Case → what each rank found."""
    return cache(lambda name: ranks.run(scored, CASES[name].world, CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_log_likelihoods_are_those_of_the_reference(found: Callable, name: str) -> None:
    """In float64, each row's log-likelihood is that of the unsharded model on the row by itself,
    although rows are padded, batched, and cut over the ranks; all ranks have the same."""
    results = [values for values, _ in found(name)]
    assert all(result == results[0] for result in results)
    wanted = expected(CASES[name])
    assert results[0] == pytest.approx(wanted, abs=1e-9)
    # Control: rows differ by far more than that, so none stands at another's place.
    apart = np.abs(np.subtract.outer(wanted, wanted))[~np.eye(len(wanted), dtype=bool)]
    assert apart.min() > 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pp 2, cp 2", "ep 2, dp_replicate 2"])
def test_the_order_of_collectives_suits_nccl(ranks: Ranks, name: str) -> None:
    """On a process group that is as strict about order and shapes as NCCL (proofs/strict)."""
    with strictly(ranks):
        results = ranks.run(scored, CASES[name].world, CASES[name])
    assert results[0][0] == pytest.approx(expected(CASES[name]), abs=1e-9)


def test_the_whole_logits_are_never_in_memory(ranks: Ranks, found: Callable) -> None:
    """A row of 131,072 tokens may be scored: its logits would take gigabytes."""
    case = CASES["pp 2, tp 2"]
    results = ranks.run(scored, case.world, case, 8)
    assert results[0][0] == pytest.approx(expected(case), abs=1e-9)
    assert max(most for _, most in results) <= 8
    assert max(most for _, most in found("pp 2, tp 2")) > 8, "control: larger pieces"
    # All ranks give up at the same group of micro-batches.
    abandoned = ranks.run(scored, case.world, case, None, 1)
    assert [values for values, _ in abandoned] == [None] * 4


# --- what is scored -------------------------------------------------------------------------------


def example(context: str, *texts: str, answer: int | None = 0) -> Example:
    return Example("file, line 1", context, texts, answer)


def row_of(context: str, choice: str) -> Row:
    task = Task("some", (example(context, choice, "other"),))
    return tokenize(task, tokenizer(), 64, "train.tasks").rows[0]


@pytest.mark.parametrize(
    ("context", "choice", "joined"),
    [
        ("import os\n\nx = os.", "path", False),
        ("    ret", "urn value", True),  # one token has the end of the context and the choice
        ("def f(self):\n    return ", "self", True),  # a space joins the next word
        ("", "import os", False),
        ("é", "ü\u20ac", False),
    ],
)
def test_every_byte_of_a_choice_is_scored(context: str, choice: str, joined: bool) -> None:
    row = row_of(context, choice)
    first, *tokens = row.tokens.tolist()
    assert first == tokenizer().bos_id, "as in training, a text begins a document"
    assert tokens == tokenizer().encode(context + choice)
    # what the scored tokens add to the text of those before
    before = tokenizer().decode(tokens[: len(tokens) - row.scored])
    scored_text = (context + choice).removeprefix(before)
    assert scored_text.endswith(choice)
    assert (scored_text != choice) == joined
    # as many tokens as the context has by itself: the harness's convention
    theirs = len(tokens) - len(tokenizer().encode(context))
    assert (theirs != row.scored) == joined, "the conventions differ only where tokens are joined"
    with patch.object(tokenizer(), "bos_id", -1):  # a text follows the end of another
        assert row_of(context, choice).tokens[0] == tokenizer().eos_id
    with pytest.raises(UserError, match=r"line 1'.* its choice .* has \d+ tokens"):
        row_of(context, choice * 99)


def results_of(*examples: Example, rows: int, nats: Sequence[float]) -> Any:
    """Of a task whose texts have so many rows each."""
    row = Row(np.arange(2), 1)
    parts = [replace(each, rows=[[row] * rows for _ in each.texts]) for each in examples]
    (found,) = results([Task("some", tuple(parts))], nats).values()
    return found


def test_measures() -> None:
    """By its log-likelihood the short choice wins, per byte the long one. Of equal ones, the first
    is chosen. Bytes are those of UTF-8: of é€, 5; of a lone surrogate, which becomes U+FFFD, 3."""
    choices = example("", "abcdefgh", "ab", answer=0), example("", "a", "b", answer=1)
    found, of_texts = results_of(*choices, rows=1, nats=[-8.0, -6.0, -1.0, -1.0])
    one_bit = 1 / math.log(2)
    assert found == {"accuracy_per_byte": 0.5, "accuracy": 0.0, "bits_per_byte": one_bit}
    assert of_texts == [[-8.0, -6.0], [-1.0, -1.0]]
    found, _ = results_of(*choices, rows=1, nats=[math.nan] * 4)
    assert all(map(math.isnan, found.values()))
    texts = example("", "é€", answer=None), example("", "x\ud800", answer=None)
    found, of_texts = results_of(*texts, rows=2, nats=[-1.0, -4.0, -2.0, -2.0])
    assert (found, of_texts) == ({"bits_per_byte": one_bit}, [[-5.0], [-4.0]])


# --- files ----------------------------------------------------------------------------------------

GOOD = '{"context": "a", "choices": ["b", "c"], "answer": 1}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"{GOOD}\n{{\n".encode(), "line 2': it is not JSON"),
        (b'\n{"text": "a", "id": 1}', "line 2.*id: Extra inputs"),
        (GOOD.replace("1}", "2}").encode(), "line 1.*answer is 2, and its choices are 0 to 1"),
        (f'{GOOD}\n{{"text": "a"}}'.encode(), "it has both choices and texts"),
        (b"\n", "it has no examples"),
        (gzip.compress(GOOD.encode()), "it cannot be read"),
    ],
    ids=["no JSON", "a key too many", "no such choice", "two forms", "empty", "compressed"],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"train\.tasks = '.*mine\.jsonl.*{said}"):
        read_tasks([str(path)], "train.tasks")


@pytest.mark.parametrize(
    ("named", "said"),
    [("python", "two tasks would have the metrics task/python/"), ("a", "no bundled task")],
)
def test_what_is_wrong_with_a_name_is_said(named: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_tasks([named, named], "train.tasks")


def test_the_bundled_tasks_are_sound() -> None:
    """No choice occurs twice in an example, and always choosing one place is no better than
    chance."""
    tasks = {task.name: task for task in read_tasks(["python", "arithmetic", "python_text"], "")}
    assert tasks["python_text"].examples[0].answer is None
    for task in (tasks["python"], tasks["arithmetic"]):
        assert all(len(set(each.texts)) == 4 for each in task.examples)
        counts = [sum(each.answer == place for each in task.examples) for place in range(4)]
        assert max(counts) < len(task.examples) / 2
    for each in tasks["arithmetic"].examples:
        assert eval(each.context.removesuffix("=")) == int(each.texts[each.answer or 0])


# --- in a run -------------------------------------------------------------------------------------


LENGTH = 32  # of the runs' sequences
MEASURES = [*(f"task/choose/{m}" for m in ("accuracy_per_byte", "accuracy", "bits_per_byte")),
            "task/mine/bits_per_byte"]  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files. The last text is cut into windows."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [json.dumps({"text": "import os\n" * n}) for n in (1, 3, 20)]
    choices = (BUNDLED / "python.jsonl").read_text().splitlines()[:8]
    for name, lines in (("choose", choices), ("mine", texts)):
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return [str(folder / f"{name}.jsonl") for name in ("choose", "mine")]


@pytest.fixture(scope="module")
def evaluated(
    ranks: Ranks, data: Path, tasks: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folders of runs of two steps on 1 and 8 ranks, evaluated after each on the tasks and on 5
    sequences, which do not divide, so that padding must not count; and of one without tasks."""
    folder = tmp_path_factory.mktemp("evaluated")
    model, checkpoint = {"init_std": 0.1, "num_layers": 2}, {"interval": 2}
    train = {"steps": 2, "eval_interval": 1, "eval_samples": 5, "dtype": "float64"}
    for name, world, layout in (("1", 1, {}), ("8", 8, LAYOUT_3D), ("none", 1, {})):
        (folder / name).mkdir()
        given = {"model": model, "checkpoint": checkpoint, "parallel": layout}
        given["train"] = train | {"tasks": [] if name == "none" else tasks}
        run(ranks, world, write_config(folder / name, data, **given))
    return folder


def test_a_run_measures_its_tasks_alike_on_every_layout(evaluated: Path) -> None:
    first, second = metrics_of(evaluated / "1")
    assert [key for key in second if key.startswith("task/")] == MEASURES
    assert first["task/mine/bits_per_byte"] != second["task/mine/bits_per_byte"]
    for one, other in zip((first, second), metrics_of(evaluated / "8"), strict=True):
        keys = ("eval_loss", *MEASURES)
        assert [other[key] for key in keys] == pytest.approx([one[key] for key in keys], rel=1e-9)
    assert losses(evaluated / "none") == losses(evaluated / "1"), "training is not changed"


def test_the_report_and_the_console_show_tasks(evaluated: Path) -> None:
    shown = page(read_run(evaluated / "1" / "run"))
    assert "Tasks: accuracy" in shown
    assert "Tasks: text" in shown
    choose, mine = of_tasks(metrics_of(evaluated / "1")[0])
    assert (choose.split()[0], choose[-1]) == ("choose", "%")
    assert (mine.split()[0], mine.split()[-1]) == ("mine", "bits/byte")


# --- tools.evaluate -------------------------------------------------------------------------------


def found_by_the_tool(folder: Path, tasks: list[str]) -> dict[str, Any]:
    """What tools.evaluate computes, on this rank of an existing process group, under the names of
    a run's metrics."""
    arguments = ["--checkpoint", str(folder), "--tasks", *tasks, "--dtype", "float64"]
    found = evaluate.evaluate(evaluate.parse(arguments), "cpu")
    return {f"task/{task}/{name}": v for task, each in found.items() for name, v in each.items()}


def test_log_likelihoods_are_those_of_transformers(
    ranks: Ranks, evaluated: Path, tasks: list[str], data: Path, tmp_path: Path
) -> None:
    """Of an exported model, by transformers in float64, from the texts themselves; and of the first
    held-out windows, whose mean the run recorded."""
    from transformers import AutoModelForCausalLM

    out = tmp_path / "exported"
    assert export.main(["--checkpoint", str(evaluated / "8/run"), "--out", str(out)]) == 0
    (found,) = ranks.run(found_by_the_tool, 1, out, tasks)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)

    def values(tokens: list[int]) -> torch.Tensor:
        """The log-likelihood of each token but the first."""
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        return logits[range(len(tokens) - 1), tokens[1:]]

    heldout = TokenDataset.open(data, "heldout")
    windows = [heldout.window(LENGTH * i, LENGTH + 1).tolist() for i in range(5)]
    loss = -torch.cat([values(window) for window in windows]).mean().item()
    assert metrics_of(evaluated / "8")[-1]["eval_loss"] == pytest.approx(loss, rel=1e-6)
    bos, encode = tokenizer().bos_id, tokenizer().encode
    for task in read_tasks(tasks, "--tasks"):
        theirs = []
        for context, text in [(each.context, t) for each in task.examples for t in each.texts]:
            tokens = [bos, *encode(context + text)]
            if task.examples[0].answer is not None:
                pairs = zip(tokens, [bos, *encode(context)], strict=False)
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                tail = tokens[-(LENGTH + 1) :]  # a long context loses its beginning
                theirs.append(values(tail)[same - len(tokens) :].sum().item())
            else:
                starts = range(0, len(tokens) - 1, LENGTH)
                windows = (tokens[start : start + LENGTH + 1] for start in starts)
                theirs.append(sum(values(window).sum().item() for window in windows))
        ours = [value for each in found[f"task/{task.name}/log_likelihoods"] for value in each]
        assert ours == pytest.approx(theirs, abs=1e-5)
        # Control: texts differ by far more.
        assert len({round(value, 2) for value in ours}) > 0.6 * len(ours)


def test_a_run_and_the_tool_agree(ranks: Ranks, evaluated: Path, tasks: list[str]) -> None:
    """The run recorded, through pp and tp, what the tool computes from its checkpoint."""
    record = metrics_of(evaluated / "8")[-1].items()
    recorded = {name: value for name, value in record if name.startswith("task/")}
    for found in ranks.run(found_by_the_tool, 2, evaluated / "8" / "run", tasks):
        found = {name: found[name] for name in found if not name.endswith("/log_likelihoods")}
        assert found == pytest.approx(recorded, rel=1e-9)


@pytest.mark.thorough
def test_the_command(saved: Path, tmp_path: Path) -> None:
    """It prints a table, and writes all log-likelihoods."""
    file, bundled = tmp_path / "found.json", ["python", "python_text"]
    command = ["tools.evaluate", "--checkpoint", str(saved / "run"), "--tasks"]
    refused, *_ = run_python([*command, "pythn"], "", ROOT)
    done, printed, errors = run_python([*command, *bundled, "--json", str(file)], "", ROOT)
    assert (refused, done) == (2, 0), errors
    nowhere = ["--json", str(tmp_path / "no" / "found.json")]  # refused before the work
    assert run_python([*command, *bundled, *nowhere], "", ROOT)[:2] == (2, "")
    head, *lines = printed.splitlines()
    assert head.split() == ["task", "examples", "accuracy", "per", "byte", "accuracy", "bits/byte"]
    assert [line.split()[0] for line in lines] == bundled
    content = json.loads(file.read_text())
    assert [len(content[name]["log_likelihoods"]) for name in bundled] == [40, 10]
    assert f"{content['python']['accuracy']:.1%}" in lines[0]
