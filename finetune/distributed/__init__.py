"""Several processes of one run: how they are launched, how they join, what they do together."""
