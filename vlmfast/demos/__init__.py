"""The demo: compare the full model with a recipe in a web page (``vlmfast demo``)."""
