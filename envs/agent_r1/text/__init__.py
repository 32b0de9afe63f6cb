"""Tokenizers, chat messages and chat templates."""
