"""The demo model `tiny`: architecture and tokenizer."""
