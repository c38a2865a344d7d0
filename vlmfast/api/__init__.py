"""What users call: models, sessions, attached models, requests and their answers."""
