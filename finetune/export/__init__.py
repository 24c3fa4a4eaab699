"""A run's model in the format of another runtime."""
