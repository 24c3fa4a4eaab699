"""What a run can be told: the schema with every default, and where a value comes from."""
