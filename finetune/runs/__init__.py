"""Training runs: prepared, trained, finished, resumed, compared; their folders and checkpoints."""
