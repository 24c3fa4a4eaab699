"""The pretrained encoder and the head on top: loading, structure and trainable parameters."""
