"""Prefill, cache, decode: the one place that runs the language model."""
