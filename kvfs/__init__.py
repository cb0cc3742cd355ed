"""kvfs: a file system for the key-value caches of LLM inference."""

__version__ = "0.1.0"
