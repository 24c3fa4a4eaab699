"""The pretrained encoder and the head on top: loading, structure, and what of it trains."""
