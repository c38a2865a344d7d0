"""Measure the accuracy of recipes: tasks, a resumable runner, tables and plots."""
