"""Before a run: what it loads, checks and refuses."""
