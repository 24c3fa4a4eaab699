"""Training runs: preparing, training, resuming and comparing them; folders and checkpoints."""
