"""Code shared by the learners. The top level is the vocabulary of an algorithm: run, arguments, trajectory, returns,
kl.

    setup      parts of a run (models, environments, threads, memory) and the checks before it
    sampling   sampling engines, and the rollout that runs episodes with one
    training   forward passes, optimizer and metrics of an update
    records    the files of a run, and their readers
    recovery   checkpoints, signals and full disks: a run continues where it stopped
    imitation  demonstrations to imitate, and small models made from scratch

`distributed` joins several processes, `streams` has the random numbers of a run.
"""
