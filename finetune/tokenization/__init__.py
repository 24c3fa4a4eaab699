"""Turns texts into token ids once, then into batches of one padded length."""
