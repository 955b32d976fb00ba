"""Recognise the memory failures of a vLLM server from what it logs."""

__version__ = "0.1.0"
