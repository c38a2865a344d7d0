"""Prefill, KV cache and decoding: the only code that runs the language model."""
