"""Find labels that are probably wrong, near duplicates, and whether a table has enough rows."""
