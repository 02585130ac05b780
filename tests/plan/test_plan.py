"""The planner agrees with the training code: planned bytes and collectives are those counted in a
rehearsal. Also tested: planned times, the search, and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plan_accuracy
from costs.events import Product
from costs.parameters import num_parameters
from costs.seconds import Links, Rates
from costs.summary import flops_per_token
from hardware import H100, Device
from settings.checks import validate
from settings.load import load_config
from tools.plan.__main__ import main
from tools.plan.candidates import candidates
from tools.plan.guide import STAGES, guide_bytes, our_bytes
from tools.plan.hardware import find_device
from tools.plan.layout import Layout
from tools.plan.memory import Memory
from tools.plan.search import Found
from tools.plan.summary import summarise
from tools.plan.time import Reduction, stalls
from tools.plan.traffic import by_axis, collectives
from tools.rehearse.rank import alone, rehearse

LLAMA_70B, LLAMA_8B = "configs/llama3_70b.yaml", "configs/llama3_8b.yaml"
SMALL = [*plan_accuracy.SMALL, "model.num_layers=4"]


def smaller(case: plan_accuracy.Case) -> plan_accuracy.Case:
    """With half as many layers and, on few ranks, half as many sequences, unless the case says how
    many."""
    less = {"num_layers": "model.num_layers=4"}
    if case.world <= 8:
        less["global_batch_size"] = "train.global_batch_size=8"
    more = [text for key, text in less.items() if key not in case.settings]
    return case._replace(settings=" ".join([case.settings, *more]))


CASES = [
    pytest.param(
        smaller(case),
        marks=[pytest.mark.thorough] if case.tier == "thorough" else [],
        id=case.settings.replace("parallel.", "") + " experts" * ("experts" in case.common),
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
    keys = [*plan_accuracy.SMALL, "train.global_batch_size=8", *keys]
    measured = alone(rehearse, load_config(LLAMA_70B, [*keys, *run]), 8, 0)
    other = Layout.of_rank(load_config(LLAMA_70B, [*keys, *planned]), 8, 0)
    assert by_axis(collectives(other)) != measured["collectives"]
    assert abs(Memory(other).peak / measured["peak_memory_bytes"] - 1) > plan_accuracy.MEMORY_LIMIT


def test_the_fullest_rank_counts_wherever_it_is() -> None:
    """A layout fits only if its fullest rank fits, whichever rank that is. Under zb_v it is not
    rank 0, which has the first and the last stage."""
    keys = ["parallel.tp=1", "parallel.pp=4", "parallel.schedule=zb_v",
            "parallel.stages_per_rank=2", "parallel.zero_stage=2",
            "model.num_layers=14"]  # fmt: skip
    config = load_config(LLAMA_70B, [*SMALL, *keys])
    found = Found(config, 8, H100)
    peaks = summarise(config, 8, H100)["peak_memory_bytes"]
    assert found.peak == max(peaks) > peaks[0]
    assert not found.fits(max(peaks) - 1)
    assert found.fits(max(peaks))


@pytest.mark.parametrize("key", ["train.compile=true", "parallel.offload=host"])
def test_only_what_a_run_would_start_is_found(key: str) -> None:
    """Compiled: no split backwards and no tp. Reduced in bfloat16: nothing adds gradients in it."""
    keys = [*SMALL, "parallel.reduce_dtype=bfloat16", key]
    found = [one.config() for one in candidates(load_config(LLAMA_70B, keys), 8, H100)]
    unsplit = {"1f1b", "gpipe", "interleaved_1f1b", "breadth_first"}
    assert found
    assert key != "train.compile=true" or {one.parallel.schedule for one in found} == unsplit
    for config in found:
        validate(config, 8)


def test_a_world_that_not_every_tp_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.plan.candidates.MODES", ("none",))
    one_layer = load_config(LLAMA_70B, [*SMALL, "model.num_layers=1"])
    assert {one.alike.parallel.tp for one in candidates(one_layer, 12, H100)} == {1, 2, 4}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--gpus 0", "--gpus = 0: must be at least 1 and"),
        (f"--search --gpus {10**30}", f"--gpus = {10**30}: must be at least 1 and"),
        ("--guide -8", "--guide = -8: must be at least 1 and"),
        ("--guide 8 --data-stage 1", "--data-stage = 1: --guide does not read it"),
        ("--search --imbalance 2", "--imbalance = 2.0: --search does not read it"),
        ("--imbalance 2", "--imbalance = 2.0: a rank receives"),
        ('--imbalance 2 data_stages=[{"from_step":1}]', "--data-stage = None: so uneven a"),
        ('--tokens 1e9 data_stages=[{"from_step":1}]', "--data-stage = None: the time of"),
        ("--search parallel.dp_shard=2000000000", "must be at least 1 and"),
        # what no layout mends
        ("--search --gpus 8 model.num_heads=1 model.num_kv_heads=1 model.num_layers=1 "
         "train.global_batch_size=7", "train.global_batch_size"),
    ],
)  # fmt: skip
def test_refused_before_a_plan_or_a_search(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([LLAMA_70B, *SMALL, *arguments.split()]) == 2
    assert said in capsys.readouterr().err


def test_what_waits_for_reductions() -> None:
    """A backward of three units, of 1 s each, whose reductions take 2 s: with room for one input
    computation waits 1 s for the first and 1 s for the second, with room for all only at the end;
    if nothing is computed between them, for all but the last."""
    units = [Reduction(1.0, 2.0, 0.5)] * 3
    assert stalls(units, 1, last=False) == 2.0
    assert stalls(units, 3, last=False) == 0.0
    assert stalls(units, 1, last=True) == stalls(units, 3, last=True) == 4.5
    split = [Reduction(0.0, 2.0, 0.5)] * 3
    assert stalls(split, 1, last=False) == 4.0
    assert stalls(split, 3, last=False) == 0.0
    assert stalls(split, 1, last=True) == 6.5


def test_a_stage_as_one_unit_hides_nothing() -> None:
    seconds = {}
    for unit in ("block", "stage"):
        keys = ["parallel.tp=2", "parallel.pp=2", "parallel.zero_stage=3"]
        config = load_config(LLAMA_70B, [*SMALL, *keys, f"parallel.fsdp_unit={unit}"])
        summary = summarise(config, 8, H100)
        row = summary["ranks"][0]["collectives"]["dp_shard"]
        seconds[unit] = summary["step_seconds"]
        hidden = row["wire_seconds"] - row["exposed_seconds"]
        assert (hidden == pytest.approx(0, abs=1e-9)) == (unit == "stage")
        assert hidden > -1e-9
    assert seconds["stage"] > seconds["block"]


def test_latency_and_rates_of_a_group() -> None:
    """Latency grows with the group. cp lies outside tp: of 8 GPUs in a node, tp 4 leaves 2 for a cp
    group, whose rate is that of the node's links only if the whole group is inside. Two ranks share
    the experts, and two each of them, in a world of eight."""
    small, large = (Links(H100, 1, ranks, 1, ranks).latency("dp_shard") for ranks in (8, 2048))
    assert small == H100.collective_seconds
    assert large == pytest.approx(small + 255 * H100.hop_seconds)
    inside, across = (Links(H100, 4, cp * 2, 1, cp * 8, cp) for cp in (2, 4))
    assert [links.in_node("cp") for links in (inside, across)] == [2, 2]
    assert inside.rate("cp") == H100.node_bytes_per_second * H100.node_efficiency
    network = H100.network_bytes_per_second * H100.network_efficiency
    assert across.rate("cp") == 2 * network
    assert across.rate("dp_shard") == 2 * network  # 8 ranks, cp included
    config = load_config("configs/laptop_moe.yaml", [])
    rows = summarise(config, 8, H100)["ranks"][0]["collectives"]
    for axis in ("ep", "efsdp"):
        assert rows[axis]["wire_bytes"] == rows[axis]["bytes"] / 2


def test_the_guides_table() -> None:
    """The guides' formula gives their published gigabytes per ZeRO stage for 7 billion parameters
    on 4 GPUs. Ours counts float32 weights and gradients."""
    theirs = [guide_bytes(7e9, 4, stage) / 1e9 for stage in STAGES]
    assert theirs == pytest.approx([84, 42, 31.5, 21])
    config = load_config(LLAMA_8B, [])
    numel = num_parameters(config.model)
    ours = [sum(our_bytes(config, 4, stage).values()) / numel for stage in STAGES]
    # Bytes per parameter: sharded weights 4 and moments 8; whole weights 2; gradients 4, which are
    # sharded from stage 2 on.
    assert ours == pytest.approx([12 + 2 + 4, 3 + 2 + 4, 3 + 2 + 1, 3 + 1], rel=1e-3)
    # the host holds what is offloaded; one rank computes with its float32 weights themselves
    for override, ranks, each in (("parallel.offload=host", 4, 1), ("train.dtype=float32", 1, 16)):
        held = our_bytes(load_config(LLAMA_8B, [override]), ranks, 3)
        assert sum(held.values()) / numel == pytest.approx(each, rel=1e-3)


def test_all_ranks_wait_for_busy_experts() -> None:
    config = load_config("configs/laptop_moe.yaml", [])
    even, uneven = (summarise(config, 8, H100, imbalance=factor) for factor in (1.0, 1.5))
    assert uneven["step_seconds"] > even["step_seconds"]
    assert max(uneven["peak_memory_bytes"]) > max(even["peak_memory_bytes"])


def seconds(rows: int, columns: int, device: Device = H100, width: int = 2) -> float:
    """Seconds of a product (in bfloat16) whose sums are so long that its bytes do not matter."""
    rates = Rates(replace(device, kernel_seconds=0.0), Links(device, 1, 1, 1, 1), 2)
    return rates.operation(Product(rows, columns, inner=2**20, bytes=0, width=width))


def test_a_product_takes_whole_waves() -> None:
    """1 to 132 tiles are one wave on an H100, 133 are two. Controls: full waves take the time of
    their FLOPs, and on a device with a single multiprocessor every tile counts."""
    one = seconds(128, 128)
    assert seconds(64 * 128, 128) == seconds(132 * 128, 128) == one
    assert seconds(132 * 128 + 1, 128) == seconds(128, 264 * 128) == 2 * one
    flops = 2.0 * 132 * 128 * 128 * 2**20
    assert one == pytest.approx(flops / (H100.peak_flops * H100.matmul_efficiency))
    # whatever the run's dtype: the math kernel of attention widens its factors
    assert seconds(128, 128, width=4) / one == pytest.approx(H100.peak(2) / H100.peak(4))
    alone = replace(H100, multiprocessors=1)
    assert seconds(64 * 128, 128, alone) == 64 * seconds(128, 128, alone)


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
        ('{"based_on": "h100", "matmul_efficiency": 68}', "matmul_efficiency"),
        ('{"based_on": "h100", "memory_bytes": 8e9}', "memory_bytes"),
    ):
        file.write_text(text)
        assert main([LLAMA_8B, "--device", str(file)]) == 2
        assert named in capsys.readouterr().err
