"""Kinds of text classification: each is one file, and nothing else depends on which it is."""
