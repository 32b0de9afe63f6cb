"""Judges of answers: mathematics, programs, and models that judge."""
