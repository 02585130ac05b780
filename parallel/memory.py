"""The categories of memory use, by which a run's report (runtime/metrics/memory_report.py) and
the planner (costs/, tools/plan/) count."""

WEIGHTS, MOMENTS = "sharded weights", "optimizer state"
GATHERED, GRADIENTS, SHARDED_GRADIENTS = "gathered weights", "whole gradients", "sharded gradients"
GATHERING, REDUCING = "buffers of gathers", "buffers of reductions"
ACTIVATIONS, DEFERRED = "activations", "kept for weight gradients"
MESSAGES, TEMPORARY = "messages of the pipeline", "temporary"
