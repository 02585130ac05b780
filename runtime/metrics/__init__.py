"""What a run writes about itself.

metrics.py         the measurements of each logged step
trackers.py        writes them to metrics.jsonl, console, wandb, TensorBoard
expert_load.py     how evenly tokens spread over experts
memory_report.py   what a rank holds in memory
"""
