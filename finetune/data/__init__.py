"""Labelled texts: where they come from, and how they are split."""

# In a folder whose name begins so a table in memory waits for the folder of its run.
TEMPORARY = "finetune-table-"
