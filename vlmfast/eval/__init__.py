"""Measuring what a recipe costs in answers: tasks, a resumable runner, tables and plots."""
