"""The commands as Python functions, one file per command."""
