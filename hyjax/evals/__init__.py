"""Evaluation: one probe a file."""
