"""The options of a run: the schema, and the sources of their values."""

# Old option names, which are still accepted.
FORMER_NAMES = {"solve_head": "fit_head", "member": "table", "unlabelled": "unlabeled"}
