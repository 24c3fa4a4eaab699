"""The report: a run's files as one page."""
