"""The planner agrees with the training code: planned bytes and collectives are those counted in a
rehearsal. Also tested: planned times, the search, and the command."""

import json
from pathlib import Path

import pytest

from benchmarks import plan_accuracy
from costs.links import Links
from costs.summary import flops_per_token
from model.transformer import num_parameters
from parallel.memory import ACTIVATIONS, MOMENTS, SHARDED_GRADIENTS, TEMPORARY, WEIGHTS
from settings.load import load_config
from tests import ROOT
from tools.plan.__main__ import main
from tools.plan.guide import STAGES, guide_bytes, our_bytes
from tools.plan.hardware import find_device
from tools.plan.layout import Layout
from tools.plan.memory import Memory
from tools.plan.search import Found, search
from tools.plan.summary import summarise
from tools.plan.traffic import by_axis, collectives
from tools.rehearse.rank import alone, rehearse

CONFIGS = ROOT / "configs"
LLAMA_70B, LLAMA_8B = (str(CONFIGS / f"llama3_{size}.yaml") for size in ("70b", "8b"))
SMALL = [*plan_accuracy.SMALL, "model.num_layers=4"]
H100 = find_device("h100")
# with half as many layers, if the case does not say how many
CASES = [
    pytest.param(
        case
        if "num_layers" in case.settings
        else case._replace(settings=f"{case.settings} model.num_layers=4"),
        marks=[pytest.mark.thorough] if case.tier == "thorough" else [],
        id=case.settings.replace("parallel.", "") + " experts" * ("num_experts" in case.common),
    )
    for case in plan_accuracy.CASES
    if case.tier
]


@pytest.mark.parametrize("case", CASES)
def test_bytes_and_collectives_are_those_of_the_training_code(case: plan_accuracy.Case) -> None:
    row = plan_accuracy.compare_rehearsed(case)
    assert row["same_collectives"]
    # what they differ in is as large with half the layers, and the peak is half as high
    assert abs(row["error"]) < 2 * plan_accuracy.MEMORY_LIMIT


@pytest.mark.parametrize(
    ("keys", "run", "planned"),
    [
        (["parallel.tp=2", "parallel.pp=2"], [], ["parallel.zero_stage=2"]),
        (["parallel.tp=2", "parallel.pp=1"], ["parallel.cp=2"], []),
    ],
    ids=["another layout", "a forgotten axis"],
)
def test_another_plan_would_be_noticed(keys: list[str], run: list[str], planned: list[str]) -> None:
    """Control: the plan for zero_stage 2 differs from a rehearsal with zero_stage 1, and one in
    which cp is data parallelism from a rehearsal with cp, in collectives and in memory."""
    keys = [*plan_accuracy.SMALL, *keys]
    measured = alone(rehearse, load_config(LLAMA_70B, [*keys, *run]), 8, 0)
    other = Layout.of_rank(load_config(LLAMA_70B, [*keys, *planned]), 8, 0)
    assert by_axis(collectives(other)) != measured["collectives"]
    assert abs(Memory(other).peak / measured["peak_memory_bytes"] - 1) > plan_accuracy.MEMORY_LIMIT


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "gpipe", "zb_h1", "zb_v", "dualpipe_v", "interleaved_1f1b", "breadth_first"],
)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_step_frees_what_it_allocates(schedule: str, zero_stage: int) -> None:
    """After a planned step, only the weights, the optimizer state, the reduced gradients, the batch
    and at most one last message remain in memory."""
    stages = 1 if schedule in ("1f1b", "gpipe", "zb_h1") else 2
    keys = ["parallel.tp=2", "parallel.pp=2", f"parallel.schedule={schedule}",
            f"parallel.stages_per_rank={stages}", f"parallel.zero_stage={zero_stage}"]  # fmt: skip
    config = load_config(LLAMA_70B, [*SMALL, *keys])
    for rank in (0, 7):
        layout = Layout.of_rank(config, 8, rank)
        memory = Memory(layout)
        stays = {WEIGHTS, MOMENTS, SHARDED_GRADIENTS}
        batch = 16 * layout.tokens * layout.num_microbatches + 8 * config.train.seq_len
        left = {name: size for name, size in memory.now.items() if size and name not in stays}
        assert left.pop(TEMPORARY) == batch
        assert sum(left.values()) in (0, layout.hidden_bytes)
        assert memory.peak == sum(memory.at_peak.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_the_fullest_rank_counts_wherever_it_is(schedule: str) -> None:
    """A layout fits only if its fullest rank fits, whichever rank that is. Under zb_v it is not
    rank 0, which has the first and the last stage."""
    v = 2 if schedule == "zb_v" else 1
    keys = ["parallel.tp=1", "parallel.pp=4", f"parallel.schedule={schedule}",
            f"parallel.stages_per_rank={v}", "parallel.zero_stage=2",
            "model.num_layers=14"]  # fmt: skip
    config = load_config(LLAMA_70B, [*SMALL, *keys])
    found = Found(config, 8, H100)
    peaks = summarise(config, 8, H100)["peak_memory_bytes"]
    assert found.peak == max(peaks)
    assert not found.fits(max(peaks) - 1)
    assert found.fits(max(peaks))
    if schedule == "zb_v":
        assert peaks[0] < max(peaks)


def test_a_world_that_tp_does_not_divide() -> None:
    config = load_config(LLAMA_70B, [*SMALL, "train.global_batch_size=12"])
    assert search(config, 12, H100).best


def test_only_what_a_run_would_start_is_found() -> None:
    keys = [*SMALL, "parallel.reduce_dtype=bfloat16", "train.compile=true"]
    result = search(load_config(LLAMA_70B, keys), 8, H100)
    assert all(one.config.train.compile for one in result.best)
    schedules = {one.config.parallel.schedule for one in result.best}
    assert not schedules & {"zb_h1", "zb_v", "dualpipe_v"}
    assert {one.config.parallel.tp for one in result.best} == {1}
    assert "train.compile=true" in " ".join(result.space)


@pytest.mark.parametrize("number", ["0", "-8", str(2**31 - 1), str(10**30)])
@pytest.mark.parametrize("option", [["--gpus"], ["--search", "--gpus"], ["--guide"]])
def test_numbers_of_gpus_that_nobody_has(
    option: list[str], number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(CONFIGS / "laptop.yaml"), "parallel.dp_shard=-1", *option, number]) == 2
    assert f"error: {option[-1]} = {number}: must be at least 1 and" in capsys.readouterr().err


def test_a_list_has_a_layout_for_at_most_a_hundred_numbers_of_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(CONFIGS / "laptop.yaml"), "--search", "--layouts", "8", "--gpus", "8000"]
    assert main(arguments) == 2
    assert "give 7208 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("train.global_batch_size=0", "train.global_batch_size"),
        ("train.seq_len=0", "train.seq_len"),
        ("train.micro_batch_size=0", "train.micro_batch_size"),
        ("parallel.cpu_offload=true", "parallel.cpu_offload"),
        ("train.global_batch_size=7", "train.global_batch_size"),
    ],
)
def test_a_search_refuses_what_no_layout_mends(
    key: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [LLAMA_70B, *SMALL, "model.num_layers=1", key, "--gpus", "64", "--search"]
    assert main(arguments) == 2
    assert named in capsys.readouterr().err


def test_a_stage_as_one_unit_hides_nothing() -> None:
    seconds = {}
    for unit in ("block", "stage"):
        keys = ["parallel.tp=2", "parallel.pp=2", "parallel.zero_stage=3"]
        config = load_config(LLAMA_70B, [*SMALL, *keys, f"parallel.fsdp_unit={unit}"])
        summary = summarise(config, 8, H100)
        first = summary["ranks"][0]
        row = first["collectives"]["dp_shard"]
        seconds[unit] = summary["step_seconds"]
        hidden = row["wire_seconds"] - row["exposed_seconds"]
        assert (hidden == pytest.approx(0, abs=1e-9)) == (unit == "stage")
        assert hidden > -1e-9
        assert sum(first["activations"].values()) == first["memory"].get(ACTIVATIONS, 0)
    assert seconds["stage"] > seconds["block"]


def test_latency_grows_with_the_group() -> None:
    small, large = (Links(H100, 1, ranks, 1, ranks).latency("dp_shard") for ranks in (8, 2048))
    assert small == H100.collective_seconds
    assert large == pytest.approx(small + 255 * H100.hop_seconds)


def test_a_cp_group_shares_a_node_as_far_as_it_fits() -> None:
    """cp lies outside tp: of 8 GPUs in a node, tp 4 leaves 2 for a cp group. Its rate is that of
    the node's links only if the whole group is inside."""
    inside, across = (Links(H100, 4, cp * 2, 1, cp * 8, cp) for cp in (2, 4))
    assert [links.in_node("cp") for links in (inside, across)] == [2, 2]
    assert inside.rate("cp") == H100.node_bytes_per_second * H100.node_efficiency
    network = H100.network_bytes_per_second * H100.network_efficiency
    assert across.rate("cp") == 2 * network
    assert across.rate("dp_shard") == 2 * network  # 8 ranks, cp included


def test_what_is_printed_of_cp(capsys: pytest.CaptureFixture[str]) -> None:
    """cp has a line of its own, and the axis that weights are sharded over is named after both.
    Control: without cp the same command prints neither."""
    arguments = [LLAMA_70B, *SMALL, "parallel.tp=2", "parallel.pp=1", "--gpus", "8"]
    printed = []
    for cp in (1, 2):
        assert main([*arguments, f"parallel.cp={cp}"]) == 0
        printed.append(capsys.readouterr().out)
    assert "over dp_shard in" in printed[0]
    assert "over cp" not in printed[0]
    assert "× cp in" not in printed[0]
    assert "over dp_shard × cp in" in printed[1]
    line = next(line for line in printed[1].splitlines() if "over cp in" in line)
    assert line.endswith("of them exposed")
    assert "over batch in 1 collectives" in printed[1]


# --- rules of thumb from guides -------------------------------------------------------------------


def test_the_guides_table() -> None:
    """The guides' formula gives their published gigabytes per ZeRO stage for 7 billion parameters
    on 4 GPUs."""
    assert [guide_bytes(7e9, 4, stage) / 1e9 for stage in range(4)] == pytest.approx(
        [84, 42, 31.5, 21]
    )


def test_ours_counts_float32_weights_and_gradients() -> None:
    config = load_config(LLAMA_8B, [])
    per_parameter = [
        sum(our_bytes(config, 4, stage).values()) / num_parameters(config.model) for stage in STAGES
    ]
    # Bytes per parameter: sharded weights 4 and moments 8; whole weights 2; gradients 4, which are
    # sharded from stage 2 on.
    assert per_parameter == pytest.approx([12 + 2 + 4, 3 + 2 + 4, 3 + 2 + 1, 3 + 1], rel=1e-3)


# --- the command ----------------------------------------------------------------------------------


def test_the_file_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    keys = [*SMALL, "parallel.tp=2", "parallel.pp=2"]
    arguments = [LLAMA_70B, *keys, "--gpus", "8", "--json", str(file)]
    assert main([*arguments, "--tokens", "1e9", "--price", "2"]) == 0
    plan = json.loads(file.read_text())
    assert len(plan["peak_memory_bytes"]) == 2
    assert plan["fits"]
    model = load_config(LLAMA_70B, keys).model
    flops = plan["tokens_per_second_per_device"] * flops_per_token(model, 1024)
    assert plan["mfu"] == pytest.approx(flops / plan["peak_flops"])
    assert plan["step_seconds"] > 0
    assert 0 < plan["bubble_fraction"] < 1
    assert "MFU" in capsys.readouterr().out


def test_devices_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"based_on": "h100", "matmul_efficiency": 0.5}')
    assert find_device(str(file)).matmul_efficiency == 0.5
    for text, named in (
        ("{}", "based_on"),
        ('{"based_on": "h100", "speed": 1}', "speed"),
        ('{"based_on": "a100", "watts": -1}', "watts"),
        ('{"based_on": []}', "based_on"),
        ('{"based_on": "h100", "gpus_per_node": 8.0}', "gpus_per_node"),
        ('{"based_on": "h100", "matmul_efficiency": 68}', "matmul_efficiency"),
        ('{"based_on": "h100", "watts": Infinity}', "watts"),
        ('{"based_on": "h100", "name": 3}', "name"),
    ):
        file.write_text(text)
        assert main([LLAMA_8B, "--device", str(file)]) == 2
        assert named in capsys.readouterr().err


def test_bytes_on_the_wire_are_those_of_the_group_of_experts() -> None:
    """Two ranks share the experts, and two each of them; the world has eight."""
    config = load_config(str(CONFIGS / "laptop_moe.yaml"), [])
    rows = summarise(config, 8, H100)["ranks"][0]["collectives"]
    for axis in ("ep", "efsdp"):
        assert rows[axis]["wire_bytes"] == rows[axis]["bytes"] / 2
