"""Evaluation on tasks: the same log-likelihoods on every layout and by transformers, and what is
scored."""

import gzip
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import count, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from errors import UserError
from model.kernels.backend import cdiv
from model.linear_cross_entropy import PIECE_BYTES
from model.transformer import Head
from parallel.axes import MeshSizes
from proofs.parity.cases import BOS, SEED, SEQ_LEN, Case
from proofs.parity.run import reference_model
from proofs.ranks import Ranks
from runtime.evaluation.rows import (
    BUNDLED,
    Example,
    Row,
    Task,
    TaskRows,
    log_likelihoods,
    measures,
    read_tasks,
    tokenize,
)
from runtime.evaluation.scoring import lengths, score_on_mesh
from runtime.metrics.trackers import of_tasks
from settings.config import DTYPES
from tests.data_samples import tokenizer
from tests.planted import planted
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
    """A row is padded to seq_len halved as often as it and the ranks' cuts of a sequence allow."""
    rows = [Row(np.arange(n + 1), 1) for n in (128, 65, 64, 33, 5, 1)]
    assert lengths(rows, 128, 1) == {32: [4, 5], 64: [2, 3], 128: [0, 1]}
    assert lengths(rows, 128, 64) == {64: [2, 3, 4, 5], 128: [0, 1]}


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

    @planted(Head, "__init__")
    def built(honest: Any, self: Head, *arguments: Any) -> None:
        honest(self, *arguments)
        product = self.matmul.forward

        def forward(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
            most[0] = max(most[0], len(x))
            return product(x, weight, *more)

        self.matmul.forward = forward  # type: ignore[method-assign]

    token_bytes = cdiv(case.vocab_size, case.layout.tp) * DTYPES[case.dtype].itemsize
    with (
        built(),
        patch("runtime.evaluation.scoring.SHORTEST", 4),
        patch.dict(PIECE_BYTES, {"cpu": pieces * token_bytes} if pieces else {}),
    ):
        rows, step = some_rows(case.vocab_size), make_step(case)
        return score_on_mesh(step, rows, SEQ_LEN, lambda: next(done) < batches), most[0]


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
def test_the_order_of_collectives_suits_nccl(name: str) -> None:
    """On a process group that is as strict about order and shapes as NCCL (proofs/strict)."""
    with Ranks(8, timeout=200, backend="strict") as strict:
        results = strict.run(scored, CASES[name].world, CASES[name])
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


def rows_of(context: str, choice: str) -> Row:
    task = Task("some", (example(context, choice, "other"),))
    (found,) = tokenize([task], tokenizer(), 64, "train.tasks")
    return found.rows[0][0][0]


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
    row = rows_of(context, choice)
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
        assert rows_of(context, choice).tokens[0] == tokenizer().eos_id
    with pytest.raises(UserError, match=r"line 1'.* its choice .* has \d+ tokens"):
        rows_of(context, choice * 99)


def test_measures() -> None:
    """By its log-likelihood the short choice wins, per byte the long one."""
    examples = (example("", "abcdefgh", "ab", answer=0), example("", "a", "b", answer=1))
    row = Row(np.arange(2), 1)
    task = TaskRows(Task("some", examples), [[[row] for _ in each.texts] for each in examples])
    (found,) = log_likelihoods([task], [-8.0, -6.0, -1.0, -1.0])
    assert measures(task, found) == {
        "accuracy_per_byte": 0.5,  # of equal ones the first is chosen
        "accuracy": 0.0,
        "bits_per_byte": 9 / 9 / math.log(2),
    }
    (found,) = log_likelihoods([task], [math.nan] * 4)
    assert all(map(math.isnan, measures(task, found).values()))
    text = Task("some", (example("", "abcd", answer=None),))
    whole = TaskRows(text, [[[row, row]]])
    (found,) = log_likelihoods([whole], [-1.0, -3.0])
    assert measures(whole, found) == {"bits_per_byte": 1 / math.log(2)}


def test_bytes_are_those_of_utf_8() -> None:
    """Of é€, 5; of a lone surrogate, which becomes U+FFFD, 3."""
    examples = (example("", "é€", answer=None), example("", "x\ud800", answer=None))
    task = TaskRows(Task("some", examples), [])
    assert measures(task, [[-5.0], [-4.0]]) == {"bits_per_byte": 1 / math.log(2)}


# --- files ----------------------------------------------------------------------------------------

GOOD = '{"context": "a", "choices": ["b", "c"], "answer": 1}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"{GOOD}\n{{\n".encode(), r"mine\.jsonl, line 2'?: it is not JSON"),
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
    with pytest.raises(UserError, match=r"train\.tasks = '.*mine\.jsonl") as raised:
        read_tasks([str(path)], "train.tasks")
    assert re.search(said, str(raised.value))
    with pytest.raises(UserError, match="two tasks would have the metrics task/python/"):
        read_tasks(["python", "python"], "train.tasks")


def test_the_bundled_tasks_are_sound() -> None:
    """No choice occurs twice in an example, and always choosing one place is no better than
    chance."""
    tasks = {task.name: task for task in read_tasks(["python", "arithmetic", "python_text"], "")}
    assert not tasks["python_text"].has_choices
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
def evaluated(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs of two steps on 1 and 8 ranks, evaluated after each on two tasks and on 5
    sequences, which do not divide, so that padding must not count; and of one without tasks. The
    last text is cut into windows."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [json.dumps({"text": "import os\n" * n}) for n in (1, 3, 20)]
    choices = (BUNDLED / "python.jsonl").read_text().splitlines()[:8]
    for name, lines in (("choose", choices), ("mine", texts)):
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    tasks = [str(folder / f"{name}.jsonl") for name in ("choose", "mine")]
    train = {"steps": 2, "eval_interval": 1, "eval_samples": 5, "dtype": "float64", "tasks": tasks}
    given: dict[str, Any] = {"checkpoint": {"interval": 2}}
    given["model"] = {"init_std": 0.1, "num_layers": 2}
    layouts: dict[str, tuple[int, dict[str, Any]]] = {"1": (1, {}), "8": (8, LAYOUT_3D)}
    for name, (world, layout) in (layouts | {"none": (1, {})}).items():
        (folder / name).mkdir()
        given["train"] = train | ({"tasks": []} if name == "none" else {})
        run(ranks, world, write_config(folder / name, data, parallel=layout, **given))
    return folder


def test_a_run_measures_its_tasks_alike_on_every_layout(evaluated: Path) -> None:
    first, second = metrics_of(evaluated / "1")
    assert [key for key in second if key.startswith("task/")] == MEASURES
    assert first["task/mine/bits_per_byte"] != second["task/mine/bits_per_byte"]
    for one, other in zip((first, second), metrics_of(evaluated / "8"), strict=True):
        for key in ("eval_loss", *MEASURES):
            assert other[key] == pytest.approx(one[key], rel=1e-9), key
    assert losses(evaluated / "none") == losses(evaluated / "1"), "training is not changed"


def test_the_report_and_the_console_show_tasks(evaluated: Path) -> None:
    shown = page(read_run(evaluated / "1" / "run"))
    assert "Tasks: accuracy" in shown
    assert "Tasks: text" in shown
    choose, mine = of_tasks(metrics_of(evaluated / "1")[0])
    assert (choose.split()[0], choose[-1]) == ("choose", "%")
    assert (mine.split()[0], mine.split()[-1]) == ("mine", "bits/byte")


# --- tools.evaluate -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(evaluated: Path) -> Path:
    return evaluated / "8" / "run"


@pytest.fixture(scope="module")
def tasks(evaluated: Path) -> list[str]:
    return [str(evaluated / f"{name}.jsonl") for name in ("choose", "mine")]


def found_by_the_tool(arguments: list[str]) -> tuple[dict[str, Any], dict[str, float]]:
    """What tools.evaluate computes, on this rank of an existing process group: each task's
    log-likelihoods, and its measures under the names of a run's metrics."""
    found = evaluate.evaluate(evaluate.parse(arguments), "cpu")
    values = {name: of_task.pop("log_likelihoods") for name, of_task in found.items()}
    measured = {
        f"task/{name}/{measure}": value
        for name, of_task in found.items()
        for measure, value in of_task.items()
    }
    return values, measured


def test_log_likelihoods_are_those_of_transformers(
    ranks: Ranks, trained: Path, tasks: list[str], tmp_path: Path
) -> None:
    """Of an exported model, by transformers in float64, from the texts themselves."""
    from transformers import AutoModelForCausalLM

    out = tmp_path / "exported"
    assert export.main(["--checkpoint", str(trained), "--out", str(out)]) == 0
    arguments = ["--checkpoint", str(out), "--tasks", *tasks, "--dtype", "float64"]
    found, _ = ranks.run(found_by_the_tool, 1, arguments)[0]
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)

    def values(tokens: list[int]) -> torch.Tensor:
        """The log-likelihood of each token but the first."""
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        return logits[range(len(tokens) - 1), tokens[1:]]

    worst = 0.0
    for task in read_tasks(tasks, "--tasks"):
        for example, ours in zip(task.examples, found[task.name], strict=True):
            for text, value in zip(example.texts, ours, strict=True):
                bos, encode = tokenizer().bos_id, tokenizer().encode
                tokens = [bos, *encode(example.context + text)]
                if task.has_choices:
                    apart = [bos, *encode(example.context)]
                    pairs = zip(tokens, apart, strict=False)
                    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                    tail = tokens[-(LENGTH + 1) :]  # a long context loses its beginning
                    theirs = values(tail)[same - len(tokens) :].sum().item()
                else:
                    starts = range(0, len(tokens) - 1, LENGTH)
                    theirs = sum(values(tokens[i : i + LENGTH + 1]).sum().item() for i in starts)
                worst = max(worst, abs(value - theirs))
    assert worst < 1e-5
    # Control: examples differ by far more.
    assert len({round(value, 2) for each in found["choose"] for value in each}) > 20


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_and_the_tool_agree(
    ranks: Ranks, trained: Path, tasks: list[str], world: int
) -> None:
    """The run recorded, through pp and tp, what the tool computes from its checkpoint."""
    arguments = ["--checkpoint", str(trained), "--tasks", *tasks, "--dtype", "float64"]
    record = metrics_of(trained.parent)[-1]
    recorded = {key: value for key, value in record.items() if key.startswith("task/")}
    for _, measured in ranks.run(found_by_the_tool, world, arguments):
        assert measured == pytest.approx(recorded, rel=1e-9)


@pytest.mark.thorough
def test_the_command(trained: Path, tmp_path: Path) -> None:
    """It prints a table, and writes all log-likelihoods."""

    def command(*tasks: str) -> subprocess.CompletedProcess:
        program = [sys.executable, "-m", "tools.evaluate", "--checkpoint", str(trained), "--tasks"]
        return subprocess.run([*program, *tasks], capture_output=True, text=True, check=False)

    file, bundled = tmp_path / "found.json", ["python", "python_text"]
    done = command(*bundled, "--json", str(file))
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["task", "examples", "accuracy", "per", "byte", "accuracy", "bits/byte"]
    assert [line.split()[0] for line in lines] == bundled
    content = json.loads(file.read_text())
    assert [len(content[name]["log_likelihoods"]) for name in bundled] == [40, 10]
    assert f"{content['python']['accuracy']:.1%}" in lines[0]
    done = command("pythn")
    assert done.returncode == 2
    assert "--tasks = 'pythn': there is no bundled task" in done.stderr
