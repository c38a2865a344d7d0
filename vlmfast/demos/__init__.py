"""The demo: the full model and a recipe answer side by side (``vlmfast demo``)."""
