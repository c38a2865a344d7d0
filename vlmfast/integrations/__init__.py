"""Other engines and clusters: features and checkpoints for vLLM, datasets with Ray."""
