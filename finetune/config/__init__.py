"""The options of a run: the schema with every default, and where a value comes from."""
