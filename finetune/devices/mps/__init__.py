"""The GPU of a Mac with Apple silicon, through Metal Performance Shaders."""
