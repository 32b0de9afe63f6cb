"""Parts of a run: models, environments, threads and memory, and what is refused before it begins."""
