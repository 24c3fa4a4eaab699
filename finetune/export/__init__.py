"""The model of a run in the format of another runtime."""
