"""Operations that the cache and the methods are made of, each with its PyTorch reference.

Nothing here knows a stage or a model: tensors in, tensors out, float32 inside.
"""
