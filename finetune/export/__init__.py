"""A run's model in the formats of other runtimes."""
