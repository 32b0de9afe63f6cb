"""The parts of benchmarks/evidence/evidence.py, one file each, and what they share: runs.py, noise.py, page.py."""
