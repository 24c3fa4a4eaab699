"""The largest batch that fits in a device's memory, and the fastest."""
