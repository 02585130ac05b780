"""The checks of experts and of the learning rate."""

from errors import UserError
from model.config import ModelConfig
from model.router import router_class
from parallel.axes import MeshSizes
from parallel.config import ParallelConfig
from settings.sections import OptimizerConfig, TrainConfig


def check_experts(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, sizes: MeshSizes
) -> None:
    """Raises UserError."""
    if not model.has_experts:
        if sizes.ep > 1:
            remedy = "set parallel.ep=1, or model.num_experts"
            raise UserError("parallel.ep", sizes.ep, "the model has no experts", remedy)
        return
    if model.num_experts % sizes.ep:
        why = f"does not divide model.num_experts={model.num_experts}"
        fits = [n for n in range(1, model.num_experts + 1) if model.num_experts % n == 0]
        raise UserError("parallel.ep", sizes.ep, why, f"choose one of {fits}")
    if sizes.tp > 1 and not parallel.sequence_parallel:
        why = "tp ranks must have different tokens, which go to different experts"
        raise UserError(
            "parallel.sequence_parallel", False, why, "set it to true, or parallel.tp=1"
        )
    if train.compile:
        why = "how many rows an expert gets is known only while a step runs, and a compiled "
        why += "block is one graph"
        raise UserError("train.compile", True, why, "set train.compile=false")
    router = router_class(model.router)
    if model.router_bias_rate and not router.has_bias:
        why = f"router {model.router} has no bias"
        remedy = "set it to 0, or model.router=sigmoid_bias"
        raise UserError("model.router_bias_rate", model.router_bias_rate, why, remedy)
    if model.experts_per_token == 1 and router.renormalises and not model.has_router_losses:
        why = f"router {model.router} divides weights by their sum, so a single one is always 1 "
        why += "and the router would learn nothing"
        remedy = "set model.router=softmax, or choose 2 experts or more"
        raise UserError("model.experts_per_token", 1, why, remedy)
    shards = sizes.of_experts()["efsdp"]
    for key, side in sides_that_cannot_be_cut(model, sizes.ep, shards):
        why = f"must be a multiple of {shards}: a rank has {model.num_experts // sizes.ep} of the "
        why += f"experts, fewer than the {shards} ranks (dp_shard · cp · tp / ep) that shard them, "
        why += "so each is cut"
        remedy = f"give {max(1, side // shards) * shards}, or another parallel.ep"
        raise UserError(key, side, why, remedy)


def sides_that_cannot_be_cut(model: ModelConfig, ep: int, shards: int) -> list[tuple[str, int]]:
    """The sides of an expert's matrices, with their keys, that `shards` ranks of FSDP would have to
    share and cannot. They share experts as wholes if an ep rank has as many."""
    if not model.has_experts or model.num_experts // ep >= shards:
        return []
    return [(key, side) for key, side in model.expert_sides.items() if side % shards]


def check_learning_rate(config: OptimizerConfig, phase: range, in_stages: bool) -> None:
    """Raise UserError if `decay_steps` does not fit the schedule. `in_stages`: the run has several
    stages, of which some share the phase."""
    steps, decay, warmup = len(phase), config.decay_steps, config.warmup_steps
    given = f"its phase of {steps} steps" if in_stages else f"train.steps={steps}"
    if config.schedule != "wsd":
        if not decay:
            return
        why = f"schedule {config.schedule} does not read it"
        remedy = "leave it out, or set optimizer.schedule=wsd"
    elif not 0 < decay <= steps:
        why = f"schedule wsd decays over the last steps of {given}"
        remedy = f"give a number between 1 and {steps}, often a tenth or a fifth of it"
    elif warmup + decay > steps:
        why = f"with optimizer.warmup_steps={warmup} they would be more than {given}: the rate "
        why += "would fall at once from where warmup ends to where the decay is by then"
        remedy = f"give at most {steps - warmup}, or " if warmup < steps else "give "
        remedy += f"optimizer.warmup_steps={steps - decay} or less"
    else:
        return
    raise UserError("optimizer.decay_steps", decay, why, remedy)
