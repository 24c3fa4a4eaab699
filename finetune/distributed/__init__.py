"""Several processes of one run: how they are started, how they join, what they do together."""
