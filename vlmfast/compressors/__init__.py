"""Visual-token reducers and cache compressors, one file per method."""
