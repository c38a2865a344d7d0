"""The public API: models, sessions, attached models, requests and answers."""
