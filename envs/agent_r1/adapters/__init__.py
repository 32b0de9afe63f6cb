"""Adapters of the environments to other trainers."""
