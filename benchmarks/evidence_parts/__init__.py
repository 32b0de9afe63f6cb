"""The parts of benchmarks/evidence.py, one file each."""
