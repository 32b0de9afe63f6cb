"""Demonstrations to imitate, and models made from scratch."""
