"""The command line: parses, calls the pipeline, and is alone in writing to the terminal."""
