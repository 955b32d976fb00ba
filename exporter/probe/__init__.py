"""Fills the steps of a vLLM server on purpose, while nobody depends on it yet."""
