"""Checks and probes of `python -m agent_r1.validate`."""
