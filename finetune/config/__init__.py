"""The options of a run: the schema with every default, and where a value comes from."""

# Earlier names of options, which stay accepted.
FORMER_NAMES = {"solve_head": "fit_head", "member": "table", "unlabelled": "unlabeled"}
