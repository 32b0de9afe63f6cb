"""Engines that sample, and the rollout that plays episodes with one."""
