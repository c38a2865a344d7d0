"""Foundations: stage protocols, recipes, token layouts, statistics."""
