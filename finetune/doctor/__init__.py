"""Checks the machine, and whether a model can run on MPS."""
