"""tools.evaluate: the numbers of transformers, and those of the run itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.tasks.files import read_tasks
from tests.data_samples import tokenizer
from tests.runs import metrics_of, write_config
from tests.runs import run as train_to_the_end
from tools import evaluate, export
from tools.ranks import Ranks

BUNDLED = ["python", "python_text"]
SEQ_LEN = 32  # that of the runs: every text of python_text is cut into windows


def scored(arguments: list[str]) -> dict[str, list[list[float]]]:
    """What tools.evaluate computes, on this rank of an existing process group."""
    tasks, found = evaluate.evaluate(evaluate.parse(arguments), "cpu")
    return {task.task.name: values for task, values in zip(tasks, found, strict=True)}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The first examples of bundled tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    for task, count in zip(read_tasks(BUNDLED, ""), (8, 2), strict=True):
        lines = [
            {"context": each.context, "choices": each.texts, "answer": each.answer}
            if task.has_choices
            else {"text": each.texts[0]}
            for each in task.examples[:count]
        ]
        (folder / f"{task.name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [str(folder / f"{name}.jsonl") for name in BUNDLED]


@pytest.fixture(scope="module")
def trained(
    ranks: Ranks, data: Path, tasks: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run in float64 on 4 ranks (pp 2, tp 2), evaluated after its only step."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = write_config(
        folder,
        data,
        model={"init_std": 0.1},
        parallel={"tp": 2, "pp": 2},
        train={"steps": 1, "dtype": "float64", "eval_interval": 1, "tasks": tasks},
        checkpoint={"interval": 1},
    )
    train_to_the_end(ranks, 4, config)
    return folder / "run"


def test_log_likelihoods_are_those_of_transformers(
    ranks: Ranks, trained: Path, tasks: list[str], tmp_path: Path
) -> None:
    """Of an exported model, by transformers in float64, from the texts themselves."""
    from transformers import AutoModelForCausalLM

    out = tmp_path / "exported"
    assert export.main(["--checkpoint", str(trained), "--out", str(out)]) == 0
    arguments = ["--checkpoint", str(out), "--tasks", *tasks, "--dtype", "float64"]
    found = ranks.run(scored, 1, arguments)[0]
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
                    same = next(
                        (i for i, (a, b) in enumerate(zip(tokens, apart, strict=False)) if a != b),
                        len(apart),
                    )
                    tail = tokens[-(SEQ_LEN + 1) :]  # a long context loses its beginning
                    theirs = values(tail)[same - len(tokens) :].sum().item()
                else:
                    starts = range(0, len(tokens) - 1, SEQ_LEN)
                    theirs = sum(
                        values(tokens[at : at + SEQ_LEN + 1]).sum().item() for at in starts
                    )
                worst = max(worst, abs(value - theirs))
    assert worst < 1e-5
    # Control: examples differ by far more.
    assert len({round(value, 2) for each in found["python"] for value in each}) > 20


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_and_the_tool_agree(
    ranks: Ranks, trained: Path, tasks: list[str], world: int
) -> None:
    """The run recorded, through pp and tp, what the tool computes from its checkpoint."""
    arguments = ["--checkpoint", str(trained), "--tasks", *tasks, "--dtype", "float64"]
    results = ranks.run(measured, world, arguments)
    (record,) = metrics_of(trained.parent)
    of_tasks = {key: value for key, value in record.items() if key.startswith("task/")}
    for result in results:
        assert result == pytest.approx(of_tasks, rel=1e-9)


def measured(arguments: list[str]) -> dict[str, float]:
    tasks, found = evaluate.evaluate(evaluate.parse(arguments), "cpu")
    return {
        f"task/{task.task.name}/{name}": value
        for task, values in zip(tasks, found, strict=True)
        for name, value in evaluate.measures(task, values).items()
    }


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.evaluate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_the_command(trained: Path, tmp_path: Path) -> None:
    """It prints a table, and writes all log-likelihoods."""
    file = tmp_path / "found.json"
    done = run("--checkpoint", str(trained), "--tasks", *BUNDLED, "--json", str(file))
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["task", "examples", "accuracy", "per", "byte", "accuracy", "bits/byte"]
    assert [line.split()[0] for line in lines] == BUNDLED
    content = json.loads(file.read_text())
    assert [len(content[name]["log_likelihoods"]) for name in BUNDLED] == [40, 10]
    assert f"{content['python']['accuracy']:.1%}" in lines[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "pythn"], "--tasks = 'pythn': there is no bundled task"),
        (["--tasks", "python", "--seq-len", "0"], "--seq-len = 0: it must be at least 1"),
        (["--tasks", "python", "--seq-len", "1"], "a row has between 1 and 1"),
        (["--tasks", "python", "--json", "/none/x"], "--json = '/none/x': it cannot be written"),
    ],
)
def test_the_command_refuses(trained: Path, arguments: list[str], said: str) -> None:
    done = run("--checkpoint", str(trained), *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
