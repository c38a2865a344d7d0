"""Training of the demo model."""
