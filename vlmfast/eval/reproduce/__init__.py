"""Measure published results again: ``vlmfast reproduce``."""
