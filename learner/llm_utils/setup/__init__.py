"""Parts of a run (models, environments, threads, memory), and the checks before it starts."""
