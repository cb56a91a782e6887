"""Training: optimizer, step, checkpoints, metrics, plots. Import the part you need; importing this does nothing."""
