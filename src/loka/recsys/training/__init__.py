"""The training loop: settings, steps, checkpoints, progress."""
