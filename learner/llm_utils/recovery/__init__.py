"""Checkpoints, signals and full disks: a run continues where it stopped."""
