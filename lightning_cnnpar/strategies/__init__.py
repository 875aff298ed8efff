"""The Lightning strategy: the life of a run, from the plan to the last checkpoint."""
