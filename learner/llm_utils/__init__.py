"""Shared code of the learners. On top is the vocabulary of an algorithm: run, arguments, trajectory, returns, kl.

setup      what a run is made from: models, environments, threads, memory; and what it refuses
sampling   engines that sample, and the rollout that plays episodes with one
training   forward passes, optimizer and metrics of an update
records    files that a run writes, and their readers
recovery   checkpoints, signals and full disks: a run continues where it stopped
imitation  demonstrations to imitate, and small models made from scratch

`distributed` joins several processes, `streams` has the random numbers of a run.
"""
