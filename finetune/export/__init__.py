"""What leaves the run folder for others: the model card."""
