"""Methods that compress the KV cache: evictors and quantizers."""
