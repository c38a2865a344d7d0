"""Drawn scenes: shapes, signs and charts, with questions whose answers are known."""
