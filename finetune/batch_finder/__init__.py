"""Finds the largest batch size that fits in device memory and the fastest one."""
