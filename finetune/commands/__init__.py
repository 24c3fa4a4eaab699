"""One file per command: its Python function, its options, and what it prints."""
