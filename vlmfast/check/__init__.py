"""Checks of kernels and of a whole model on the user's machine, for ``vlmfast check``."""
