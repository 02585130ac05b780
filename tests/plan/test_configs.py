"""Every file in configs/ is right: it loads, fits the world size in its first line, has the model
it names, and fits an 80 GB GPU. (The plan of each pipeline rank is recorded from its layers.)"""

import json
import re
from pathlib import Path

import pytest
import yaml

from costs.parameters import num_parameters
from errors import UserError
from hardware import H100
from settings.checks import validate
from settings.config import Config
from settings.data_stages import data_stages
from settings.layouts import choose_layout, layout_sizes
from settings.load import load_config
from tests import ROOT
from tools.launch import layout
from tools.plan.layout import Layout
from tools.plan.memory import peaks
from tools.plan.time import StepTime

CONFIGS, DOCS = ROOT / "configs", ROOT / "docs"
FILES = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
PARAMETERS = {  # as published with the models
    "llama_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_131072": 8_030_261_248,
    "llama3_8b_data_stages": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
}


def load(name: str, *overrides: str) -> Config:
    return load_config(str(CONFIGS / f"{name}.yaml"), list(overrides))


def read(name: str) -> tuple[Config, int]:
    """The configuration and the world size that it is made for."""
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    first_line = re.match(r"# world: (\d+)\n", text)
    assert first_line, f"{name}.yaml must begin with '# world: N'"
    return load(name), int(first_line[1])


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_it_says(name: str) -> None:
    """It fits its world and no other, is the model that it names, has relative paths, and is in the
    manual."""
    config, world = read(name)
    validate(config, world)
    with pytest.raises(UserError):  # control: validate can refuse
        validate(config, world - 1)
    if name in PARAMETERS:
        assert num_parameters(config.model) == PARAMETERS[name]
    data = [config.data.path] if isinstance(config.data.path, str) else list(config.data.path)
    paths = [config.run.dir, config.data.tokenizer, *data]
    assert not any(Path(p).is_absolute() for p in paths)
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    assert "# yaml-language-server: $schema=schema.json\n" in text
    page = (DOCS / "running.md").read_text(encoding="utf-8")
    assert f"| [{name}](../configs/{name}.yaml) |" in page


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("name", ["laptop", "laptop_moe"])
def test_make_train_fits_what_the_machine_has(name: str, num_gpus: int) -> None:
    path = str(CONFIGS / f"{name}.yaml")
    processes, overrides = layout(num_gpus, path, [])
    assert processes <= (num_gpus or 8)
    config = load_config(path, overrides)
    validate(config, processes)
    assert config.train.dtype == ("bfloat16" if num_gpus else "float32")


def peak(config: Config, world: int) -> int:
    """The planned peak memory, in bytes, of the pipeline rank that needs most in any data stage."""
    return max(max(peaks(Layout(stage.config, world, 0))) for stage in data_stages(config))


@pytest.mark.parametrize("name", FILES)
def test_fits_80_gb(name: str) -> None:
    assert peak(*read(name)) <= H100.room


@pytest.mark.parametrize("override", ["parallel.zero_stage=1", "train.micro_batch_size=2"])
def test_the_plan_can_refuse(override: str) -> None:
    """Control: the plan finds that 8B on 8 GPUs does not fit with unsharded gradients, nor with
    micro-batches of two sequences; and what a later data stage does not fit."""
    assert peak(load("llama3_8b", override), 8) > H100.room
    later = load("llama3_8b_data_stages", "data_stages.1.train.activation_checkpointing=none")
    assert peak(later, 64) > H100.room


def test_the_70b_file_is_faster_than_with_tp_across_the_machine() -> None:
    """The reason that the file gives for tp 4."""
    layouts = load("llama3_70b"), load("llama3_70b", "parallel.tp=8", "parallel.pp=2")
    four, eight = (StepTime(Layout(config, 256, 0), H100).step_seconds for config in layouts)
    assert four < eight


def sbatch_examples() -> list[tuple[int, list[str]]]:
    """Every example with a number of nodes, in the job script and the pages: the nodes less the
    spare ones, and the script's arguments; not those with a configuration of the user's own,
    CONFIG.yaml."""
    found, script = [], "slurm/train_70b.sh"
    for file in (ROOT / script, *sorted(DOCS.glob("*.md"))):
        for line in file.read_text(encoding="utf-8").splitlines():
            words = line.lstrip("# ").split()
            if words[:1] == ["sbatch"] and "--nodes" in words and script in words:
                after = words[words.index(script) + 1 :]
                arguments = [word for word in after if "=" in word or word.endswith(".yaml")]
                # of MIN-MAX the most: that is what the configuration's own layout is for
                nodes = words[words.index("--nodes") + 1].rpartition("-")[2]
                spare = re.search(r"SPARE_NODES=(\d+)", line)
                if "CONFIG.yaml" not in arguments:
                    found.append((int(nodes) - int(spare[1] if spare else 0), arguments))
    return found


def test_every_example_of_the_job_fits_its_nodes() -> None:
    """The layout makes the world of the nodes that train, 8 GPUs each."""
    examples = sbatch_examples()
    assert len(examples) >= 4
    for nodes, arguments in examples:
        name, *overrides = arguments or ["configs/llama3_70b.yaml"]
        validate(load_config(str(ROOT / name), overrides), 8 * nodes)


def test_the_keys_of_an_unattended_run() -> None:
    """docs/operating.md: its keys are valid in llama3_70b.yaml, its job has the spare node that
    the page promises, and the smallest layout fits the fewest nodes."""
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    keys = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])  # type: ignore[index]
    overrides = [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in keys.items()
        for key, value in values.items()
    ]
    config = load("llama3_70b", *overrides)
    ((fewest, nodes),) = [map(int, both) for both in re.findall(r"--nodes (\d+)-(\d+) ", page)]
    (least,) = map(int, re.findall(r"MIN_NODES=(\d+)", page))
    assert fewest == nodes - 1
    assert layout_sizes(config) == [8 * fewest, 8 * least]
    for world in layout_sizes(config):
        validate(choose_layout(config, world), world)
