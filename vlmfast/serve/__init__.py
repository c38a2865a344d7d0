"""An HTTP server with OpenAI's API: ``vlmfast serve``."""
