"""Benchmarks: each script measures both sides of a comparison in one run, and writes its results as
JSON to results/."""
