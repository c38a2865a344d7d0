"""Drafters for speculative decoding, one file per method."""
