"""Sampling engines, and the rollout that runs episodes with one."""
