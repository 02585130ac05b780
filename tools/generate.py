"""Continue text with a checkpoint: `python -m tools.generate --checkpoint DIR --prompt TEXT [--max-new-tokens N] …`

One process loads the checkpoint of any layout and computes the whole sequence again for each new token.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from data.tokenizer import Tokenizer
from errors import UserError
from model.config import ModelConfig
from model.initialise import canonical_name
from model.transformer import Batch, Transformer
from parallel.mesh import build_mesh
from training.checkpoint import complete_checkpoints, read_trainer
from training.join import start_distributed
from training.manifest import MANIFEST
from training.voice import refuse


def load_model(checkpoint: Path, device: str) -> Transformer:
    """The whole model of a checkpoint, unsharded, in float32 on this process's device."""
    config = ModelConfig(**read_trainer(checkpoint, "--checkpoint")["model"])
    mesh = build_mesh((1, 1, 1, 1), device)
    model = Transformer(config, range(config.num_layers), first=True, last=True, tp=mesh.tp, sequence_parallel=False)
    model.to_empty(device=device)
    named = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    wanted = {name: tensor for name, tensor in named.items() if canonical_name(name, config) == name}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    for name, tensor in named.items():
        tensor.copy_(wanted[canonical_name(name, config)])
    return model


@torch.no_grad()
def generate(model: Transformer, prompt: list[int], count: int, temperature: float, seed: int, stop: int) -> list[int]:
    """Up to `count` new tokens after `prompt`, drawn at `temperature` (0: the most likely one), until token `stop`."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        column = torch.tensor(tokens, device=device).unsqueeze(1)  # [S, 1]
        positions = torch.arange(len(tokens), device=device).unsqueeze(1)
        logits: Tensor = model(None, Batch(column, None, positions))[-1, 0]  # [V]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token == stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def newest(folder: Path) -> Path:
    """`folder` itself if it is a checkpoint, else the newest complete one in it, in its `checkpoints/`."""
    if (folder / MANIFEST).is_file():
        return folder
    complete = complete_checkpoints(folder) or complete_checkpoints(folder / "checkpoints")
    if not complete:
        raise UserError("--checkpoint", str(folder), "holds no complete checkpoint", "give a run folder or a folder step-…")
    return complete[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint, or a run folder: its newest one")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    arguments = parser.parse_args()

    device = start_distributed()
    try:
        checkpoint = newest(arguments.checkpoint)
        tokenizer = Tokenizer.load(checkpoint / "tokenizer.model")
        model = load_model(checkpoint, device)
    except UserError as error:
        refuse(error)
    prompt = [tokenizer.bos_id, *tokenizer.encode(arguments.prompt)]
    new = generate(model, prompt, arguments.max_new_tokens, arguments.temperature, arguments.seed, tokenizer.eos_id)
    sys.stdout.write(arguments.prompt + tokenizer.decode(new) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
