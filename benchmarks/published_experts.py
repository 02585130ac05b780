"""Published training speeds of mixtures of experts: settings, figures, sources, as in
published_rows.py. benchmarks/plan_published.py plans them.

The planner assumes that all experts receive equally many rows. So do the benchmarks here, by one of
two means: a router that ignores its logits, or experts that take no more than their share and drop
the rest (a capacity factor of 1). Megatron-LM cuts each expert over tp too, unless a row says
`expert-tensor-parallel-size 1`; Lattice never does, so the other rows with tp are not comparable.
"""

from benchmarks.published_rows import CUDNN, Model, Row, System

MIXTRAL_8X7B = Model(4096, 32, 32, 8, 14336, 32000, num_experts=8, experts_per_token=2)
MIXTRAL_8X22B = Model(6144, 56, 48, 8, 16384, 32000, num_experts=8, experts_per_token=2)
# the same, with 64 experts of an eighth of the width, 8 for each token
G8T8 = MIXTRAL_8X22B._replace(num_experts=64, experts_per_token=8, expert_ffn_dim=2048)
LLAMA3_8X70B = Model(8192, 80, 64, 8, 28672, 128256, num_experts=8, experts_per_token=2)
QWEN2_57B = Model(3584, 28, 28, 4, 18944, 151936, num_experts=64, experts_per_token=8,
                  expert_ffn_dim=2560, num_shared_experts=8)  # fmt: skip
QWEN3_235B = Model(4096, 94, 64, 4, 12288, 151936, attention_dim=8192, qk_norm=True,
                   num_experts=128, experts_per_token=8, expert_ffn_dim=1536)  # fmt: skip

CUT = "experts cut over tp"
DEEP_EP = "DeepEP"  # sends a token once to each machine and rank, and permutes in the same kernel
HIDDEN = "rows sent beside another micro-batch"
UNEVEN = "a trained router"

FOLDING = System(
    "MoE folding",
    "arxiv.org/abs/2504.14960 tables 3 to 5",
    4096,
    "capacity factor 1, so the host never waits; fused permutation and weighting of rows",
    attention="causal",  # with the whole square, MFU would grow in table 5, not fall
    zero_stage=1,
    rates=CUDNN,
    unverified="micro-batch (1, as in Megatron's published settings for these layouts), virtual "
    "stages (all: the MFU of 256 and 1,024 sequences excludes none), recomputation (the least that "
    "fits), attention's kernel and its share of FLOPs",
)
SHARDED = FOLDING._replace(zero_stage=3, unverified=FOLDING.unverified + ", dtype of reductions")
EXPERTS_OF_TOKEN = "experts of a token (2); " + FOLDING.unverified
UPCYCLED = FOLDING._replace(unverified=EXPERTS_OF_TOKEN)
UPCYCLED_SHARDED = SHARDED._replace(unverified=EXPERTS_OF_TOKEN + ", dtype of reductions")
ZOO = System(
    "Megatron MoE zoo",
    "github.com/yanring/Megatron-MoE-ModelZoo best_practice/Qwen3/readme.md",
    4096,
    "`norm, act` is planned as selective; fused permutation and weighting of rows",
    attention="causal",
    zero_stage=1,
    rates=CUDNN,
    unverified="attention's kernel, forced balance",
)
ZOO_SHARDED = ZOO._replace(zero_stage=3, unverified=ZOO.unverified + ", dtype of reductions")
ZOO_LONG = ZOO._replace(differs="recomputes norms and experts, planned as full; the rest as above")
ZOO_MIXTRAL = ZOO._replace(
    source="github.com/yanring/Megatron-MoE-ModelZoo best_practice/Mixtral/run_mixtral_8x22B.sh",
    unverified="virtual stages (the file of settings has none, which would leave no time for "
    "communication), recomputation, attention's kernel",
)
MCORE = System(
    "Megatron-Core 0.9",
    "github.com/NVIDIA/Megatron-LM megatron/core/transformer/moe/README.md",
    4096,
    "fused permutation of rows",
    zero_stage=1,
    rates=CUDNN,
    unverified="layout (its mapping of v0.8), balance, recomputation, attention's kernel",
)


def tera(flops: float) -> float:
    """TFLOP/s as MFU of H100, in percent."""
    return flops / 989 * 100


ROWS = [
    Row(SHARDED, "8x22B", MIXTRAL_8X22B, 128, 256, 1, "none", mfu=4.3, tp=8, apart=CUT),
    Row(SHARDED, "8x22B", MIXTRAL_8X22B, 128, 256, 1, "none", mfu=23.4, tp=2, ep=8, apart=CUT),
    Row(FOLDING, "8x22B", MIXTRAL_8X22B, 128, 256, 1, "none", mfu=36.6, tp=4, ep=8, apart=CUT),
    Row(FOLDING, "8x22B", MIXTRAL_8X22B, 128, 256, 1, "selective", mfu=46.3, tp=2, pp=8, ep=4,
        stages=7, apart=CUT),
    Row(FOLDING, "8x22B", MIXTRAL_8X22B, 128, 256, 1, "none", mfu=49.3, tp=2, pp=8, ep=8, stages=7),
    *(
        Row(FOLDING, "8x22B", MIXTRAL_8X22B, gpus, 1024, 1, "none", mfu=mfu, tp=2, pp=8, ep=8,
            stages=7)
        for gpus, mfu in ((128, 52.2), (256, 50.7), (512, 48.9), (1024, 44.9))
    ),
    Row(FOLDING, "8x22B", MIXTRAL_8X22B, 128, 1024, 1, "none", mfu=47.6, tp=2, cp=4, pp=8, ep=8,
        stages=7, seq_len=16384),
    Row(FOLDING, "8x22B", MIXTRAL_8X22B, 256, 512, 1, "none", mfu=45.1, tp=2, cp=8, pp=8, ep=8,
        stages=7, seq_len=32768),
    Row(FOLDING, "8x22B", MIXTRAL_8X22B, 512, 256, 1, "none", mfu=44.5, tp=4, cp=8, pp=8, ep=8,
        stages=7, seq_len=65536),
    Row(FOLDING, "8x22B", MIXTRAL_8X22B, 1024, 128, 1, "none", mfu=42.9, tp=8, cp=8, pp=8, ep=8,
        stages=7, seq_len=131072),
    Row(SHARDED, "57B", QWEN2_57B, 64, 256, 1, "none", mfu=9.9, tp=2, apart=CUT),
    Row(SHARDED, "57B", QWEN2_57B, 64, 256, 1, "none", mfu=25.4, ep=8),
    Row(FOLDING, "57B", QWEN2_57B, 64, 256, 1, "none", mfu=23.1, tp=4, ep=4, apart=CUT),
    Row(FOLDING, "57B", QWEN2_57B, 64, 256, 1, "none", mfu=35.3, tp=2, pp=4, ep=4, stages=7,
        apart=CUT),
    Row(FOLDING, "57B", QWEN2_57B, 64, 256, 1, "none", mfu=39.0, tp=2, pp=4, ep=4, stages=7),
    *(
        Row(FOLDING, "57B", QWEN2_57B, gpus, 1024, 1, "none", mfu=mfu, tp=2, pp=4, ep=4, stages=7)
        for gpus, mfu in ((64, 39.9), (128, 39.7), (256, 38.1), (512, 36.6), (1024, 33.4))
    ),
    *(
        Row(SHARDED, "57B", QWEN2_57B, gpus, 1024, 1, "none", mfu=mfu, ep=8)
        for gpus, mfu in ((64, 26.3), (128, 25.6), (256, 23.4), (512, 22.8), (1024, 21.6))
    ),
    Row(SHARDED, "G8T8", G8T8, 128, 256, 1, "none", mfu=2.2, tp=8, apart=CUT),
    Row(SHARDED, "G8T8", G8T8, 128, 256, 1, "none", mfu=9.0, tp=4, ep=8, apart=CUT),
    Row(FOLDING, "G8T8", G8T8, 128, 256, 1, "none", mfu=8.7, tp=8, ep=8, apart=CUT),
    Row(FOLDING, "G8T8", G8T8, 128, 256, 1, "none", mfu=17.1, tp=2, pp=8, ep=8, stages=7,
        apart=CUT),
    Row(FOLDING, "G8T8", G8T8, 128, 256, 1, "none", mfu=28.8, tp=4, pp=8, ep=8, stages=7),
    *(
        Row(FOLDING, "G8T8", G8T8, gpus, 1024, 1, "none", mfu=mfu, tp=4, pp=8, ep=8, stages=7)
        for gpus, mfu in ((128, 30.0), (256, 29.3), (512, 26.7), (1024, 25.5))
    ),
    Row(UPCYCLED_SHARDED, "8x70B", LLAMA3_8X70B, 256, 256, 1, "none", mfu=19.6, tp=8, ep=8,
        apart=CUT),
    Row(UPCYCLED, "8x70B", LLAMA3_8X70B, 256, 256, 1, "none", mfu=38.8, tp=8, pp=8, ep=4, stages=10,
        apart=CUT),
    Row(UPCYCLED, "8x70B", LLAMA3_8X70B, 256, 256, 1, "none", mfu=41.6, tp=8, pp=16, ep=8,
        stages=5),
    # Table 4 has a third row, whose number of GPUs (128, or 256 as for the other layout) is unclear
    *(
        Row(UPCYCLED, "8x70B", LLAMA3_8X70B, gpus, 1024, 1, "none", mfu=mfu, tp=8, pp=16, ep=8,
            stages=5)
        for gpus, mfu in ((512, 42.7), (1024, 41.5))
    ),
    Row(ZOO, "235B", QWEN3_235B, 256, 2048, 1, "selective", mfu=tera(245), tp=2, pp=8, ep=32,
        stages=4, apart=DEEP_EP),
    Row(ZOO, "235B", QWEN3_235B, 256, 2048, 1, "selective", mfu=tera(276), tp=2, pp=8, ep=32,
        stages=4, apart=f"{DEEP_EP}, {HIDDEN}"),
    Row(ZOO_SHARDED, "235B", QWEN3_235B, 256, 2048, 4, "full", mfu=tera(276), tp=2, ep=8,
        apart=DEEP_EP),
    Row(ZOO, "235B", QWEN3_235B, 256, 2048, 1, "selective", mfu=tera(200), tp=2, pp=32, ep=8,
        stages=3),
    Row(ZOO, "235B", QWEN3_235B, 256, 2048, 1, "none", mfu=tera(167), tp=4, pp=8, ep=8, stages=4,
        apart=DEEP_EP),
    *(
        Row(ZOO_LONG, "235B", QWEN3_235B, 256, 256, 1, "full", mfu=tera(found), tp=4, cp=cp, pp=8,
            ep=8, stages=4, seq_len=16384 * cp, apart=apart)
        for cp, *both in ((1, 295, 237), (2, 335, 277), (4, 368, 320), (8, 389, 357))
        for found, apart in zip(both, (DEEP_EP, f"{DEEP_EP}, {UNEVEN}"), strict=True)
    ),
    Row(ZOO_MIXTRAL, "8x22B", MIXTRAL_8X22B, 128, 256, 1, "none", mfu=tera(470), tp=2, pp=8, ep=8,
        stages=7),
    Row(ZOO_MIXTRAL, "8x22B", MIXTRAL_8X22B, 128, 256, 1, "none", mfu=tera(455), tp=2, pp=8, ep=8,
        stages=7, apart=UNEVEN),
    Row(MCORE, "8x7B", MIXTRAL_8X7B, 64, 256, 1, "none", mfu=tera(468), pp=4, ep=8, stages=8),
]  # fmt: skip
