"""What memory is for: the names under which the planner counts it and tools/rehearse/tape.py
measures it."""

WEIGHTS, MOMENTS = "sharded weights", "optimizer state"
GATHERED, GRADIENTS, SHARDED_GRADIENTS = "gathered weights", "whole gradients", "sharded gradients"
GATHERING, REDUCING = "buffers of gathers", "buffers of reductions"
ACTIVATIONS, DEFERRED = "activations", "kept for weight gradients"
MESSAGES, TEMPORARY = "messages of the pipeline", "temporary"

# Kinds of activations; the planner alone tells them apart.
STREAM = "hidden states between blocks, and after attention"
NORMED = "outputs and statistics of norms"
PROJECTED = "queries, keys, values"
ATTENDED = "attention's output"
GATED = "gate, up, and their product"
PRODUCTS = "outputs of row-parallel products"
HEAD = "the head's gradients, formed in forward"
POSITIONS = "angles of positions, places of tokens"
KINDS = (STREAM, NORMED, PROJECTED, ATTENDED, GATED, PRODUCTS, HEAD, POSITIONS)
