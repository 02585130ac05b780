"""Compares the tokens per second of tools/generate and `transformers`, with the same weights on one
CPU core: `python -m benchmarks.generate`

One process has both models in float32, which generate greedily in turn from the same prompt, for
several rounds; both must generate the same tokens. Time is the process's CPU time, which with one
thread on an idle machine equals the elapsed time. Ratios are computed within a round, and their
median is kept; absolute times mean little on a CPU.

`transformers` generates in two ways: by `generate()`, as its users do, and by its model's forward
with its cache in a minimal loop, without what `generate()` does between tokens. All read the same
weights once per token, so the larger the model, the closer the ratios are to one: the comparison is
of the work other than matrix products.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from benchmarks.about import about
from model.config import ModelConfig
from model.initialise import initialise
from model.transformer import Transformer, num_parameters
from runtime.start.init_distributed import init_distributed
from tools.command import CommandParser, run_command
from tools.generate.load_model import empty_model
from tools.generate.loop import generate
from tools.generate.sampling import Sampling
from tools.huggingface.config import parameters

ROOT = Path(__file__).parent.parent
SIZES = {
    "laptop": ModelConfig(
        dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=384, vocab_size=4096
    ),
    "hidden_512": ModelConfig(
        dim=512, num_layers=8, num_heads=8, num_kv_heads=4, ffn_dim=1536, vocab_size=4096
    ),
}
PROMPT_LENGTH = 16
# (prompt, number of tokens to generate) → the generated tokens
Writer = Callable[[list[int], int], list[int]]


def ours(model: Transformer) -> Writer:
    def write(prompt: list[int], count: int) -> list[int]:
        return [
            token
            for (token,) in generate(model, [prompt], count, Sampling(temperature=0))
            if token is not None
        ]

    return write


def same_in_transformers(model: Transformer) -> Any:
    """LlamaForCausalLM with the weights of `model`."""
    config = model.config
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attn_implementation="sdpa",
        )
    ).eval()
    weights = dict(model.named_parameters())
    state = {each.theirs: weights[each.ours].to_local() for each in parameters(config)}
    other.load_state_dict(state)
    other.generation_config.eos_token_id = None  # so that it always generates the requested number
    return other


def by_generate(other: Any) -> Writer:
    def write(prompt: list[int], count: int) -> list[int]:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        out = other.generate(
            tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    return write


def by_forward(other: Any) -> Writer:
    @torch.inference_mode()
    def write(prompt: list[int], count: int) -> list[int]:
        tokens, written = torch.tensor([prompt]), []
        cache = transformers.DynamicCache(config=other.config)
        for _ in range(count):
            logits = other(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            written.append(int(tokens))
        return written

    return write


def measure(config: ModelConfig, count: int, rounds: int) -> dict[str, Any]:
    model = empty_model(config, torch.float32, "cpu")
    initialise(model, seed=0)
    other = same_in_transformers(model)
    writers = {
        "ours": ours(model),
        "transformers_generate": by_generate(other),
        "transformers_forward": by_forward(other),
    }
    prompt = torch.randint(
        config.vocab_size, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    written = {name: write(prompt, count) for name, write in writers.items()}  # also warms up
    if len({tuple(tokens) for tokens in written.values()}) > 1:
        raise SystemExit("the same weights did not generate the same tokens")
    speeds: dict[str, list[float]] = {name: [] for name in writers}
    for _ in range(rounds):
        for name, write in writers.items():
            begin = time.process_time()
            write(prompt, count)
            speeds[name].append(count / (time.process_time() - begin))
    result: dict[str, Any] = {
        "parameters": num_parameters(config),
        "new_tokens": count,
        "rounds": rounds,
    }
    result["tokens_per_cpu_second"] = {
        name: statistics.median(values) for name, values in speeds.items()
    }
    for name in ("transformers_generate", "transformers_forward"):
        ratios = [mine / theirs for mine, theirs in zip(speeds["ours"], speeds[name], strict=True)]
        result[f"ours_over_{name}"] = {
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        }
    return result


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/generate.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed()
    results: dict[str, Any] = {**about("transformers"), "sizes": {}}
    for name, config in SIZES.items():
        results["sizes"][name] = measure(config, arguments.new_tokens, arguments.rounds)
        print(name, json.dumps(results["sizes"][name], indent=1), flush=True)
    dist.destroy_process_group()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
