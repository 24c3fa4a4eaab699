"""Texts become token ids once, then batches of one padded length."""
