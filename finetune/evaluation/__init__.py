"""Predictions of a trained model, and statistics of their quality."""
