"""What Lattice lacks for other families of models: the reason in the refusal of each. Read from the
code of transformers 5.23."""

from typing import Any

GEMMA = "its norms multiply by 1 + weight, its embeddings are scaled by √D and its gate is GELU"
AFTER = "its norms follow attention and feed-forward instead of preceding them"
WHOLE = "its norms of queries and keys are over all heads together, here over each"
MLA = "its attention is latent (MLA), here it has keys and values"
PARTLY = "it rotates a part of each head, with interleaved pairs"
# architecture → what it computes that this model does not
LACKS = {
    "CohereForCausalLM": "its norms are LayerNorm, attention and feed-forward are parallel, and "
    "its logits are scaled",
    "DeepseekV2ForCausalLM": MLA,
    "DeepseekV3ForCausalLM": MLA,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": f"{GEMMA}; it also has norms after attention and feed-forward, soft caps "
    "of scores and logits, and a window in every second layer",
    "Gemma3ForCausalLM": f"{GEMMA}; it also has norms after attention and feed-forward, and layers "
    "with a window and another rope_theta",
    "Gemma3ForConditionalGeneration": f"it has an image encoder, and {GEMMA}",
    "GlmForCausalLM": f"{PARTLY}, and its queries, keys and values have biases",
    "Glm4ForCausalLM": f"{PARTLY}, and it has norms before and after attention and feed-forward",
    "Glm4MoeForCausalLM": "it rotates a part of each head, its queries, keys and values have "
    "biases, and its router is a sigmoid with a shared expert",
    "GptOssForCausalLM": "its router, its experts and its attention have biases, and its attention "
    "has sinks and a window in every second layer",
    "GraniteForCausalLM": "its embeddings, attention, residuals and logits have multipliers",
    "Llama4ForCausalLM": "some layers have no rotary embedding, others attend within chunks",
    "Llama4ForConditionalGeneration": "it has an image encoder, layers without rotary embedding, "
    "and layers that attend within chunks",
    "OlmoForCausalLM": "its norms have no weights (LayerNorm)",
    "Olmo2ForCausalLM": f"{AFTER}, and {WHOLE}",
    "Olmo3ForCausalLM": f"{AFTER}, {WHOLE}, and three of four layers have a window",
    "OlmoeForCausalLM": WHOLE,
    "Phi3ForCausalLM": "its queries, keys and values are one tensor, and so are gate and up",
    "Qwen2ForCausalLM": "its queries, keys and values have biases",
    "Qwen2MoeForCausalLM": "it has biases in attention, and a gate on the shared expert",
    "Qwen3NextForCausalLM": "three of four layers have linear attention (gated delta net)",
    "SmolLM3ForCausalLM": "every fourth layer has no rotary embedding",
    "Starcoder2ForCausalLM": "its norms are LayerNorm, its linear layers have biases, and its "
    "feed-forward has no gate",
}
# The fields of the supported families, and those that do not change what a model computes.
KNOWN = """
_attn_implementation _name_or_path architectures attention_bias attention_dropout auto_map
bos_token_id decoder_sparse_step dtype eos_token_id head_dim hidden_act hidden_size
initializer_range intermediate_size layer_types max_position_embeddings max_window_layers
mlp_bias mlp_only_layers model_type moe_intermediate_size norm_topk_prob num_attention_heads
num_experts num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts
output_router_logits pad_token_id partial_rotary_factor pretraining_tp quantization_config
rms_norm_eps rope_parameters rope_scaling rope_theta router_aux_loss_coef router_jitter_noise
sliding_window tie_word_embeddings torch_dtype transformers_version unk_token_id use_cache
use_sliding_window vocab_size
"""
SHOWN = 8


def fields_of_others(content: dict[str, Any]) -> list[str]:
    """The fields of a config.json that no supported family has."""
    unknown = sorted(content.keys() - {*KNOWN.split()})
    more = f"{len(unknown) - SHOWN} other fields"
    return unknown if len(unknown) <= SHOWN else [*unknown[:SHOWN], more]
