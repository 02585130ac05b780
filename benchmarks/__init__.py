"""What is measured, against whom: each script measures side by side in one run and keeps its
results as JSON in results/."""
