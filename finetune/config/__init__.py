"""The options of a run: the schema, and the sources of their values."""
