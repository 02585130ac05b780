"""Published training speeds of other systems: settings, figures, sources.
benchmarks/plan_published.py plans them."""

from typing import NamedTuple

from hardware import Device


class Model(NamedTuple):
    """The dimensions of a model, named as in ModelConfig."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    tie_embeddings: bool = False
    attention_dim: int | None = None
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 1
    expert_ffn_dim: int | None = None
    num_shared_experts: int = 0


def gpt(dim: int, layers: int, heads: int, vocabulary: int, tied: bool = True) -> Model:
    """A GPT model: as many key/value heads as query heads, and a feed-forward of 4·D without a gate
    (planned as a gated one of 8/3·D)."""
    return Model(dim, layers, heads, heads, round(8 / 3 * dim / 64) * 64, vocabulary, tied)


LLAMA2_7B, LLAMA2_13B = Model(4096, 32, 32, 32, 11008, 32000), Model(5120, 40, 40, 40, 13824, 32000)
CODELLAMA_34B = Model(8192, 48, 64, 8, 22016, 32000)
LLAMA2_70B = Model(8192, 80, 64, 8, 28672, 32000)
LLAMA3_8B, LLAMA3_70B = Model(4096, 32, 32, 8, 14336, 128256), Model(8192, 80, 64, 8, 28672, 128256)
LLAMA3_405B = Model(16384, 126, 128, 8, 53248, 128256)
MPT_3B, MPT_7B = gpt(2560, 32, 20, 50368), gpt(4096, 32, 32, 50368)
MPT_13B = gpt(5120, 40, 40, 50368)
MPT_30B, MPT_70B = gpt(7168, 48, 56, 50368), gpt(8192, 80, 64, 50368)
NEMOTRON_15B = Model(6144, 32, 48, 8, 16384, 256000)
NEMOTRON_340B = Model(18432, 96, 96, 8, 49152, 256000)
GPT_177B, GPT_175B = gpt(12288, 96, 96, 131072, tied=False), gpt(12288, 96, 96, 51200)


class System(NamedTuple):
    """The settings shared by the rows of one publication."""

    name: str
    source: str
    seq_len: int
    differs: str  # how the system differs from what the planner's constants assume
    device: str = "h100"
    attention: str = "full"  # how its MFU counts attention: full or causal
    zero_stage: int = 3
    reduce_dtype: str = "float32"
    unverified: str = ""  # settings or figures that were not compared with a source
    rates: dict[str, float] = {}  # noqa: RUF012  (published rates of its machines and kernels)


class Row(NamedTuple):
    """A published figure."""

    system: System
    model_name: str
    model: Model
    gpus: int
    batch: int  # sequences
    micro_batch: int  # 0 (and `recomputed` empty): chosen as in benchmarks/plan_megatron.py
    recomputed: str  # none, selective, full
    mfu: float = 0.0  # percent, in the system's convention; or:
    tokens: float = 0.0  # tokens per second and GPU
    tp: int = 1
    cp: int = 1
    pp: int = 1
    stages: int = 1  # stages per pipeline rank
    replicas: int = 1  # dp_replicate
    seq_len: int = 0  # 0: that of the system
    ep: int = 1
    apart: str = ""  # work that differs from what the planner assumes; empty: none known


PRODUCTS = "recomputes products"  # torchtitan's `selective`: every second product of a block
EAGER = "eager"  # norms, rotation and gate take several kernels each
CAPPED = "500 W"  # power limit; the data sheet has 700 W, so the clock is lower in products
UNFUSED = "unfused attention"  # the scores are written to memory
BLOCKS = "recomputes some blocks"

TITAN = System(
    "torchtitan",
    "github.com/pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md",
    8192,
    "H100 with HBM2e and a power limit of 500 W; `selective` recomputes every second product",
    rates={"memory_bytes_per_second": 2.4e12},
)
TITAN_TP = TITAN._replace(
    source="github.com/pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, "
    "first version"
)
TITAN_405B = TITAN._replace(
    source="github.com/pytorch/torchtitan docs/performance.md of August 2024",
    unverified="whether compiled",
)
TITAN_A100 = TITAN._replace(
    name="torchtitan A100",
    source="github.com/pytorch/torchtitan docs/performance.md of May 2024",
    device="a100",
    rates={},
    seq_len=4096,
    differs="not compiled",
    unverified="network (200 Gb/s a GPU)",
)
FOUNDRY = System(
    "llm-foundry",
    "github.com/mosaicml/llm-foundry scripts/train/benchmarking/README.md, H100 BF16",
    2048,
    "the first flash attention, in Triton; learned positions; LayerNorm and GELU one kernel each",
)
FOUNDRY_A100 = FOUNDRY._replace(
    name="llm-foundry A100", source=FOUNDRY.source.replace("H100 BF16", "A100 80GB"), device="a100"
)
FOUNDRY_PURE = FOUNDRY_A100._replace(reduce_dtype="bfloat16")  # as the column `MP Mode` says
FMS = System(
    "fms-fsdp",
    "pytorch.org/blog/maximizing-training-throughput, table 2",
    4096,
    "compiled block by block",
    reduce_dtype="bfloat16",
    unverified="recomputation (that of pytorch.org/blog/maximizing-training)",
)
FMS_A100 = FMS._replace(
    name="fms-fsdp A100",
    source="pytorch.org/blog/maximizing-training-throughput, table 1",
    device="a100",
    rates={"network_bytes_per_second": 6.25e9},
)
FMS_EAGER = FMS._replace(
    source="pytorch.org/blog/maximizing-training, table 1",
    differs="not compiled; 800 Gb/s a node",
    unverified="",
    rates={"network_bytes_per_second": 12.5e9},
)
NANOCHAT = System(
    "nanochat",
    "github.com/karpathy/nanochat run1000.sh",
    2048,
    "compiled; ReLU² and no gate; Muon, which reduces after the backward",
    zero_stage=1,
    reduce_dtype="bfloat16",
)
PICOTRON = System(
    "picotron",
    "github.com/huggingface/picotron README.md",
    1024,
    "flash-attn's kernels for attention, norms and rotation",
    zero_stage=0,
    unverified="layout, batch, sequence (those of the README's examples); the figures are round",
)
# cuDNN's attention reaches 539 TFLOP/s where flash attention 2 reaches 335 (H100, forward, causal,
# heads of 128, 16,384 tokens: arxiv.org/abs/2407.08608, figure 5).
CUDNN = {"attention_efficiency": Device.attention_efficiency * 539 / 335}
NEMO = System(
    "NeMo",
    "github.com/NVIDIA/dgxc-benchmarking llama3.1/README.md, README_70b.md (NeMo 24.12 and later)",
    8192,
    "cuDNN's attention for Hopper; Transformer Engine's fusions",
    zero_stage=1,
    reduce_dtype="bfloat16",
    rates=CUDNN,
)
NEMO_GPT = NEMO._replace(
    source="github.com/NVIDIA/dgxc-benchmarking nemo_megatron/README_175b.md, "
    "nemotron/README_15b.md, README_340b.md",
    seq_len=4096,
)
LLAMA3 = System(
    "Llama 3",
    "arxiv.org/abs/2407.21783 table 4",
    8192,
    "a production run: documents masked, all ranks wait for the slowest",
    attention="causal",
    zero_stage=1,
    unverified="virtual stages (8, of one block), MFU's convention; not compared with the paper",
)
MEGATRON = System(
    "Megatron-LM",
    "github.com/NVIDIA/Megatron-LM README.md of July 2024, strong scaling",
    4096,
    "what the constants were fitted on, at other sizes of the world",
    zero_stage=1,
    unverified="layout (that of weak scaling; the rest as benchmarks/plan_megatron.py chooses)",
)
SC21 = System(
    "Megatron SC21",
    "arxiv.org/abs/2104.04473 table 1",
    2048,
    "no flash attention; whole sequence on every tp rank",
    device="a100",
    zero_stage=0,
    unverified="micro-batch, virtual stages; not compared with the paper (it counts recomputed "
    "operations: 3/4 of its figure)",
)
KORTHIKANTI = System(
    "Megatron 2022",
    "arxiv.org/abs/2205.05198 table 5",
    2048,
    "no flash attention, but its scores recomputed",
    device="a100",
    zero_stage=0,
    unverified="not compared with the paper",
)
MEGASCALE = System(
    "MegaScale",
    "arxiv.org/abs/2402.15627 table 2",
    2048,
    "attention and feed-forward side by side, sliding window, LAMB",
    device="a100",
    zero_stage=1,
    unverified="layout; not compared with the paper",
)

ROWS = [
    Row(TITAN, "8B", LLAMA3_8B, 8, 16, 2, "selective", tokens=5762,
        apart=f"{CAPPED}, {PRODUCTS}, {EAGER}"),
    Row(TITAN, "8B", LLAMA3_8B, 8, 16, 2, "selective", tokens=6667, apart=f"{CAPPED}, {PRODUCTS}"),
    Row(TITAN, "8B", LLAMA3_8B, 128, 256, 2, "selective", tokens=5605,
        apart=f"{CAPPED}, {PRODUCTS}, {EAGER}"),
    Row(
        TITAN, "8B", LLAMA3_8B, 128, 256, 2, "selective", tokens=6514, apart=f"{CAPPED}, {PRODUCTS}"
    ),
    Row(TITAN_TP, "8B", LLAMA3_8B, 64, 96, 12, "selective", tokens=4378, tp=8,
        apart=f"{CAPPED}, {PRODUCTS}"),
    Row(TITAN_TP, "70B", LLAMA3_70B, 256, 512, 16, "full", tokens=597.3, tp=8, apart=CAPPED),
    Row(TITAN_405B, "405B", LLAMA3_405B, 128, 32, 2, "full", tokens=109, tp=8, apart=CAPPED),
    Row(FOUNDRY, "3B", MPT_3B, 64, 1152, 6, "none", mfu=40.8),
    Row(FOUNDRY, "7B", MPT_7B, 8, 48, 6, "none", mfu=46.44),
    Row(FOUNDRY, "7B", MPT_7B, 8, 128, 8, "full", mfu=37.14, seq_len=8192),
    Row(FOUNDRY, "13B", MPT_13B, 8, 16, 2, "none", mfu=39.79),
    Row(FOUNDRY, "13B", MPT_13B, 64, 128, 2, "none", mfu=39.86),
    Row(FOUNDRY, "30B", MPT_30B, 32, 1344, 14, "full", mfu=43.92),
    Row(FOUNDRY, "70B", MPT_70B, 32, 1024, 2, "full", mfu=36.15),
    Row(FOUNDRY, "70B", MPT_70B, 64, 2048, 8, "full", mfu=42.57),
    Row(FMS, "7B", LLAMA2_7B, 464, 928, 2, "none", mfu=45, replicas=58),
    Row(FMS, "13B", LLAMA2_13B, 464, 928, 2, "selective", mfu=43, apart=BLOCKS),
    Row(FMS, "34B", CODELLAMA_34B, 464, 928, 2, "full", mfu=38),
    Row(FMS, "70B", LLAMA2_70B, 464, 928, 2, "full", mfu=38),
    Row(FMS_EAGER, "7B", LLAMA2_7B, 96, 192, 2, "none", tokens=7500, replicas=12, apart=EAGER),
    Row(FMS_EAGER, "70B", LLAMA2_70B, 96, 192, 2, "full", tokens=800, apart=EAGER),
    Row(NANOCHAT, "1.9B", gpt(2048, 32, 16, 65536, tied=False), 8, 256, 8, "none", mfu=50.9),
    Row(PICOTRON, "1.7B", Model(2048, 24, 32, 32, 8192, 49152, True), 8, 1024, 4, "none", mfu=50),
    Row(PICOTRON, "7B", LLAMA2_7B, 64, 2048, 4, "none", mfu=38, tp=2, pp=2),
    Row(NEMO, "8B", LLAMA3_8B, 8, 128, 1, "none", mfu=62.47, cp=2),
    Row(NEMO, "8B", LLAMA3_8B, 128, 2048, 1, "none", mfu=62.16, cp=2),
    Row(
        NEMO, "70B", LLAMA3_70B, 64, 128, 1, "none", mfu=54.52, tp=4, cp=2, pp=4, stages=5
    ),
    Row(NEMO, "70B", LLAMA3_70B, 2048, 4096, 1, "none", mfu=53.68, tp=4, cp=2, pp=4, stages=5),
    Row(NEMO, "405B", LLAMA3_405B, 1024, 512, 1, "none", mfu=55.31, tp=8, cp=2, pp=8, stages=8),
    Row(NEMO_GPT, "15B", NEMOTRON_15B, 16, 64, 4, "none", tokens=93223 / 16, tp=4),
    Row(NEMO_GPT, "15B", NEMOTRON_15B, 2048, 8192, 4, "none", tokens=11622595 / 2048, tp=4),
    Row(NEMO_GPT, "175B", GPT_175B, 128, 256, 1, "none", mfu=53.54, tp=4, pp=8, stages=12,
        seq_len=2048),
    Row(NEMO_GPT, "175B", GPT_175B, 2048, 4096, 1, "none", mfu=52.40, tp=4, pp=8, stages=12,
        seq_len=2048),
    Row(NEMO_GPT, "340B", NEMOTRON_340B, 128, 32, 1, "none", tokens=28432 / 128, tp=8, pp=8,
        stages=12),
    Row(NEMO_GPT, "340B", NEMOTRON_340B, 2048, 512, 1, "none", tokens=433296 / 2048, tp=8, pp=8,
        stages=12),
    Row(LLAMA3, "405B", LLAMA3_405B, 8192, 2048, 1, "none", mfu=43, tp=8, pp=16, stages=8),
    Row(LLAMA3, "405B", LLAMA3_405B, 16384, 2048, 1, "none", mfu=41, tp=8, pp=16, stages=8),
    Row(LLAMA3, "405B", LLAMA3_405B, 16384, 128, 1, "none", mfu=38, tp=8, cp=16, pp=16, stages=8,
        seq_len=131072),
    Row(MEGATRON, "177B", GPT_177B, 96, 1152, 0, "", mfu=47, tp=8, pp=6, stages=0),
    Row(MEGATRON, "177B", GPT_177B, 4608, 1152, 0, "", mfu=42, tp=8, pp=6, stages=0),
    Row(TITAN_A100, "13B", LLAMA2_13B, 64, 128, 2, "none", mfu=61.1, apart=EAGER),
    Row(TITAN_A100, "70B", LLAMA2_70B, 64, 128, 2, "full", mfu=50.5, apart=EAGER),
    Row(TITAN_A100, "70B", LLAMA3_70B, 64, 64, 1, "full", mfu=51.7, seq_len=8192, apart=EAGER),
    Row(FOUNDRY_A100, "3B", MPT_3B, 8, 160, 10, "none", mfu=62.11),
    Row(FOUNDRY_A100, "7B", MPT_7B, 8, 96, 6, "none", mfu=64.23),
    Row(FOUNDRY_A100, "7B", MPT_7B, 8, 128, 8, "full", mfu=54.47, seq_len=8192),
    Row(FOUNDRY_A100, "13B", MPT_13B, 8, 48, 2, "none", mfu=59.57),
    Row(FOUNDRY_A100, "30B", MPT_30B, 8, 504, 3, "full", mfu=55.3),
    Row(FOUNDRY_PURE, "70B", MPT_70B, 32, 1024, 2, "full", mfu=48.56),
    Row(FOUNDRY_PURE, "70B", MPT_70B, 64, 2048, 8, "full", mfu=53.33),
    Row(FMS_A100, "7B", LLAMA2_7B, 128, 256, 2, "none", mfu=68, replicas=16),
    Row(FMS_A100, "13B", LLAMA2_13B, 128, 256, 2, "selective", mfu=60, apart=BLOCKS),
    Row(FMS_A100, "34B", CODELLAMA_34B, 128, 256, 2, "full", mfu=54),
    Row(FMS_A100, "70B", LLAMA2_70B, 128, 256, 2, "full", mfu=55),
    Row(SC21, "18B", gpt(6144, 40, 48, 51200), 256, 1024, 4, "full", mfu=75 * 135 / 312, tp=8,
        apart=UNFUSED),
    Row(SC21, "146B", gpt(12288, 80, 96, 51200), 1536, 2304, 1, "full", mfu=75 * 148 / 312, tp=8,
        pp=8, stages=2, apart=UNFUSED),
    Row(
        KORTHIKANTI, "22B", gpt(6144, 48, 64, 51200), 8, 4, 4, "none", mfu=41.5, tp=8, apart=UNFUSED
    ),
    Row(KORTHIKANTI, "175B", GPT_175B, 64, 64, 1, "none", mfu=51.4, tp=8, pp=8, stages=3,
        apart=UNFUSED),
    Row(KORTHIKANTI, "530B", gpt(20480, 105, 128, 51200), 280, 280, 1, "none", mfu=56.0, tp=8,
        pp=35, stages=3, apart=UNFUSED),
    Row(KORTHIKANTI, "1T", gpt(25600, 128, 160, 51200), 512, 512, 1, "none", mfu=56.3, tp=8, pp=64,
        apart=UNFUSED),
    Row(MEGASCALE, "175B", gpt(12288, 96, 128, 64000), 12288, 6144, 1, "none", mfu=55.2, tp=8, pp=8,
        stages=6, apart="parallel blocks"),
]  # fmt: skip
