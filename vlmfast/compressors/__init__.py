"""Visual-token reducers and KV-cache compressors, one file per method."""
