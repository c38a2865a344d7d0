"""Replays of golden files, one module for a method or a group of them."""
