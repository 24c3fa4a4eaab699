"""The run folder: its layout, its lock, and how files and checkpoints reach the disk whole."""
