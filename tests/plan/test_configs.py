"""Every file in configs/ is right: it loads, fits the world size in its first line, has the model
it names, builds on every kind of rank, and fits an 80 GB GPU.

Each rank is built on the meta device, in a separate process with a fake process group of `# world:`
ranks, in which collectives return without any communication.
"""

import contextlib
import json
import multiprocessing
import re
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from errors import UserError
from model.transformer import Transformer, num_parameters
from parallel.expert import ExpertParallel
from parallel.fsdp_units import shard
from parallel.layer import TensorParallel
from parallel.mesh import Mesh, build_mesh
from proofs.ranks import PRELOAD
from settings.checks import validate
from settings.config import Config
from settings.layouts import choose_layout, layout_sizes
from settings.load import load_config
from settings.precision import DTYPES
from tests import ROOT
from tools.launch import layout
from tools.plan.hardware import find_device
from tools.plan.layout import Layout
from tools.plan.memory import peaks
from tools.plan.time import StepTime

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# Of these, `make test` builds ranks: dense, with a long pipeline, with cp, with experts.
KINDS = {"laptop", "llama3_70b", "llama3_8b_131072", "qwen3_30b_a3b"}
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
H100 = find_device("h100")
ROOM = H100.room


def read(path: Path) -> tuple[Config, int]:
    """The configuration and the world size that it is made for."""
    first_line = re.match(r"# world: (\d+)\n", path.read_text(encoding="utf-8"))
    assert first_line, f"{path.name} must begin with '# world: N'"
    return load_config(str(path), []), int(first_line[1])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        slow = "alone" in metafunc.fixturenames  # about two seconds for each file
        marks = lambda path: [pytest.mark.thorough] * (slow and path.stem not in KINDS)  # noqa: E731
        listed = [pytest.param(path, id=path.stem, marks=marks(path)) for path in CONFIGS]
        metafunc.parametrize("path", listed)


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable]:
    """A function that runs another in a fresh process, because a process can be one rank of one
    world only. The processes are forked from a server without threads: a fork of this process
    could inherit a lock held by a thread that does not exist in the fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with context.Pool(2, maxtasksperchild=1) as pool:
        yield lambda function, *arguments: _result(pool, function, arguments)


def _result(pool: Pool, function: Callable, arguments: tuple) -> object:
    # re-raises an exception of the other process
    return pool.apply_async(function, arguments).get(timeout=120)


# --- the file -------------------------------------------------------------------------------------


def test_fits_its_world_and_no_other(path: Path) -> None:
    config, world = read(path)
    validate(config, world)
    with pytest.raises(UserError):  # control: validate can refuse
        validate(config, world - 1)


def test_is_the_model_it_names(path: Path) -> None:
    if path.stem in PARAMETERS:
        assert num_parameters(read(path)[0].model) == PARAMETERS[path.stem]


@pytest.mark.parametrize("name", ["laptop", "laptop_moe"])
@pytest.mark.parametrize("num_gpus", [0, 1, 2, 3, 4, 6, 8, 16])
def test_make_train_fits_what_the_machine_has(num_gpus: int, name: str) -> None:
    path = str(ROOT / "configs" / f"{name}.yaml")
    processes, overrides = layout(num_gpus, path, [])
    assert processes <= (num_gpus or 8)
    config = load_config(path, overrides)
    validate(config, processes)
    assert config.train.dtype == ("bfloat16" if num_gpus else "float32")


def test_paths_are_relative(path: Path) -> None:
    config, _ = read(path)
    data = [config.data.path] if isinstance(config.data.path, str) else list(config.data.path)
    paths = [config.run.dir, config.data.tokenizer, *data]
    assert not any(Path(p).is_absolute() for p in paths)


# --- parameters of a rank -------------------------------------------------------------------------


def transformer(config: Config, stage: int, mesh: Mesh) -> Transformer:
    layers = config.split_layers()
    first, last = stage == 0, stage == len(layers) - 1
    tp = TensorParallel.of(mesh.tp, config.parallel.sequence_parallel)
    ep = ExpertParallel.of(mesh)
    return Transformer(config.model, layers[stage], first, last, tp, ep=ep)


def parameters_by_name(path: Path) -> dict[str, int]:
    """Name → global number of elements, of all stages' parameters as rank 0 builds them."""
    config, world = read(path)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh_sizes = config.parallel.mesh_sizes(world)
    mesh = build_mesh(mesh_sizes, "cpu", config.model.has_experts)
    sizes: dict[str, int] = {}
    for stage in range(config.parallel.num_stages):
        for name, parameter in transformer(config, stage, mesh).named_parameters():
            assert parameter.is_meta
            assert name not in sizes, f"two stages hold {name}"
            sizes[name] = parameter.numel()  # a DTensor's numel is the global one
    return sizes


def local_parameters(path: Path, rank: int) -> int:
    """The number of elements that `rank` keeps of its stages after sharding by tp and FSDP."""
    config, world = read(path)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    sizes = config.parallel.mesh_sizes(world)
    mesh = build_mesh(sizes, "cpu", config.model.has_experts)
    count = 0
    for s in range(config.parallel.num_stages):
        if config.parallel.ranks_of_stages[s] != mesh.pp_rank:
            continue
        stage = transformer(config, s, mesh)
        units = [[block] for block in stage.blocks.values()]
        units += [
            [module] for module in (stage.embedding, stage.norm, stage.head) if module is not None
        ]
        compute, reduce = DTYPES[config.train.dtype], DTYPES[config.parallel.reduce_dtype]
        shard(stage, units, mesh, compute_dtype=compute, reduce_dtype=reduce, cpu_offload=False)
        for parameter in stage.parameters():
            assert isinstance(parameter, DTensor)
            count += parameter.to_local().numel()
    return count


def test_stages_add_up_to_the_model(path: Path, alone: Callable) -> None:
    config, _ = read(path)
    sizes = alone(parameters_by_name, path)
    # A tied head is a copy, not another parameter.
    copies = sizes["head.weight"] if config.model.tie_embeddings else 0
    assert sum(sizes.values()) - copies == num_parameters(config.model)


def test_every_kind_of_rank_builds_its_share(path: Path, alone: Callable) -> None:
    """Four kinds of rank build and hold the expected number of elements: the first rank, one of a
    middle stage, the first of the last stage, and the last of all (the last tp rank)."""
    config, world = read(path)
    stage = world // config.parallel.pp  # ranks
    for rank in sorted({0, config.parallel.pp // 2 * stage, world - stage, world - 1}):
        share = local_parameters_expected(config, world, rank // stage)
        # Norm weights are whole on every tp rank, and FSDP pads uneven shards, hence the tolerance
        # of 0.1%.
        assert alone(local_parameters, path, rank) == pytest.approx(share, rel=1e-3)


# --- memory of a GPU ------------------------------------------------------------------------------


def stage_parameters(config: Config, pp_rank: int) -> int:
    """The number of parameters in the stages of `pp_rank`, before sharding by tp and FSDP."""
    model, layers = config.model, config.split_layers()
    attention = 2 * model.dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    widths = model.ffn_dim
    if model.has_experts:
        widths = (model.num_experts + model.num_shared_experts) * model.expert_width
    block = attention + 3 * model.dim * widths + 2 * model.dim
    embedding = model.vocab_size * model.dim
    mine = [s for s, rank in enumerate(config.parallel.ranks_of_stages) if rank == pp_rank]
    return sum(
        len(layers[s]) * block
        + (s == 0) * embedding
        + (s == len(layers) - 1) * (embedding + model.dim)
        for s in mine
    )


def local_parameters_expected(config: Config, world: int, pp_rank: int) -> float:
    sizes = config.parallel.mesh_sizes(world)
    shards, model = sizes.of_weights()["dp_shard"], config.model  # dp_shard · tp = efsdp · ep
    stages = [s for s, rank in enumerate(config.parallel.ranks_of_stages) if rank == pp_rank]
    layers = sum(len(config.split_layers()[s]) for s in stages)
    routers = layers * model.num_experts * model.dim / shards  # whole on every tp rank
    return stage_parameters(config, pp_rank) / (sizes.tp * shards) + routers


def peak(config: Config, world: int) -> int:
    """The planned peak memory, in bytes, of the pipeline rank that needs most."""
    return max(peaks(Layout(config, world, 0)))


def test_fits_80_gb(path: Path) -> None:
    config, world = read(path)
    assert peak(config, world) <= ROOM


@pytest.mark.parametrize("override", ["parallel.zero_stage=1", "train.micro_batch_size=2"])
def test_the_plan_can_refuse(override: str) -> None:
    """Control: the plan finds that 8B on 8 GPUs does not fit with unsharded gradients, nor with
    micro-batches of two sequences."""
    assert peak(load_config(str(CONFIGS[0].parent / "llama3_8b.yaml"), [override]), 8) > ROOM


def test_the_70b_file_is_faster_than_with_tp_across_the_machine() -> None:
    """The reason that the file gives for tp 4."""
    wide = "parallel.tp=8", "parallel.pp=2"
    four, eight = (
        StepTime(
            Layout(load_config(str(CONFIGS[0].parent / "llama3_70b.yaml"), keys), 256, 0), H100
        )
        for keys in ([], list(wide))
    )
    assert four.step_seconds < eight.step_seconds


# --- the manual -----------------------------------------------------------------------------------


def test_the_manual_lists_every_configuration(path: Path) -> None:
    page = (path.parent.parent / "docs" / "running.md").read_text(encoding="utf-8")
    assert f"| [{path.stem}](../configs/{path.name}) |" in page


def sbatch_examples() -> list[tuple[int, list[str]]]:
    """Every example with a number of nodes, in the job script and the pages: the nodes, and the
    script's arguments; not those with a configuration of the user's own, CONFIG.yaml."""
    root = ROOT
    found = []
    for file in (root / "slurm" / "train_70b.sh", *sorted((root / "docs").glob("*.md"))):
        for line in file.read_text(encoding="utf-8").splitlines():
            words = line.lstrip("# ").split()
            if words[:1] == ["sbatch"] and "--nodes" in words and "slurm/train_70b.sh" in words:
                after = words[words.index("slurm/train_70b.sh") + 1 :]
                arguments = [word for word in after if "=" in word or word.endswith(".yaml")]
                # of MIN-MAX the most: that is what the configuration's own layout is for
                nodes = words[words.index("--nodes") + 1].rpartition("-")[2]
                if "CONFIG.yaml" not in arguments:
                    found.append((int(nodes), arguments))
    return found


@pytest.mark.parametrize(("nodes", "arguments"), sbatch_examples(), ids=str)
def test_an_example_of_the_job_fits_its_nodes(nodes: int, arguments: list[str]) -> None:
    """The layout makes the world of the nodes (less the spare ones, at most two), 8 GPUs each."""
    name, *overrides = arguments or ["configs/llama3_70b.yaml"]
    config = load_config(str(CONFIGS[0].parent.parent / name), overrides)
    fits = []
    for spare in (0, 2):
        with contextlib.suppress(UserError):
            validate(config, 8 * (nodes - spare))
            fits.append(spare)
    assert fits


def test_the_examples_of_the_job_are_found() -> None:
    assert len(sbatch_examples()) >= 4


def test_the_keys_of_an_unattended_run() -> None:
    """docs/operating.md: its keys are valid in llama3_70b.yaml, its job has the spare node that
    the page promises, and the smallest layout fits the fewest nodes."""
    page = (CONFIGS[0].parent.parent / "docs/operating.md").read_text(encoding="utf-8")
    keys = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])  # type: ignore[index]
    overrides = [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in keys.items()
        for key, value in values.items()
    ]
    config = load_config(str(CONFIGS[0].parent / "llama3_70b.yaml"), overrides)
    (nodes,) = map(int, re.findall(r"--nodes (\d+) ", page))
    (least,) = map(int, re.findall(r"MIN_NODES=(\d+)", page))
    assert layout_sizes(config) == [8 * (nodes - 1), 8 * least]
    for world in layout_sizes(config):
        validate(choose_layout(config, world), world)
