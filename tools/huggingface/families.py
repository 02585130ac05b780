"""What Lattice lacks for other families of models: the reason in the refusal of each. Read from the
code of transformers 5.23."""

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
