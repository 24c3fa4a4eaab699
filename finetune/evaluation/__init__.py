"""Predictions of a trained model, and statistics of how good they are."""
