"""Kernels of the cache and the methods, each with its PyTorch reference.

They take and return tensors, compute in float32 and do not depend on stages or models.
"""
