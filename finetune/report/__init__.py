"""Reports: the files of a run as one page."""
