"""Whether this machine is ready, and whether a model is for MPS."""
