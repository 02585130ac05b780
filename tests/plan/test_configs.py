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


def peak(config: Config, world: int) -> int:
    """The planned peak memory, in bytes, of the pipeline rank that needs most in any data stage."""
    return max(max(peaks(Layout(stage.config, world, 0))) for stage in data_stages(config))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_it_says(name: str) -> None:
    """It fits its world and no other, and 80 GB, is the model that it names, has relative paths,
    and is in the manual."""
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    begins = re.match(r"# world: (\d+)\n# yaml-language-server: \$schema=schema.json\n", text)
    assert begins, f"{name}.yaml must begin with '# world: N' and its schema"
    config, world = load(name), int(begins[1])
    validate(config, world)
    with pytest.raises(UserError):  # control: validate can refuse
        validate(config, world - 1)
    assert peak(config, world) <= H100.room
    if name in PARAMETERS:
        assert num_parameters(config.model) == PARAMETERS[name]
    data = [config.data.path] if isinstance(config.data.path, str) else list(config.data.path)
    paths = [config.run.dir, config.data.tokenizer, *data]
    assert not any(Path(p).is_absolute() for p in paths)
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


# With a number of nodes; of MIN-MAX the most, which is what the configuration's own layout is for.
SBATCH = re.compile(r"(?m)^[# ]*sbatch .*--nodes (?:\d+-)?(\d+) .*slurm/train_70b\.sh(.*)")


def test_every_example_of_the_job_fits_its_nodes() -> None:
    """In the job script and the pages, except those with the user's own CONFIG.yaml. The layout
    fits the nodes that train (all but the spare ones), with 8 GPUs each."""
    files = [ROOT / "slurm/train_70b.sh", *DOCS.glob("*.md")]
    found = [each for file in files for each in SBATCH.finditer(file.read_text(encoding="utf-8"))]
    examples = [each for each in found if "CONFIG.yaml" not in each[2]]
    assert len(examples) >= 4
    for example in examples:
        spare = re.search(r"SPARE_NODES=(\d+)", example[0])
        given = [word for word in example[2].split() if "=" in word or word.endswith(".yaml")]
        name, *overrides = given or ["configs/llama3_70b.yaml"]
        nodes = int(example[1]) - int(spare[1] if spare else 0)
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
