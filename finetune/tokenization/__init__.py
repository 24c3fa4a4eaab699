"""Turns texts into token IDs once, then into batches of one padded length."""
