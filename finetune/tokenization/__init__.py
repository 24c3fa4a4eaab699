"""Tokenizes texts once, then makes batches with one padded length each."""
