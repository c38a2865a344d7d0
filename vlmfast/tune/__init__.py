"""Choosing the cheapest recipe whose loss of accuracy on a user's data stays within a bound."""
