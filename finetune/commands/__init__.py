"""The command line: parses, calls api/, and is alone in writing to the terminal."""
