"""Training: stages, drafters and the demo model."""
