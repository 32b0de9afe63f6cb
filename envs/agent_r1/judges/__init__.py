"""Judges of answers: mathematics and programs."""
