"""Task types (one label, several labels, a number): each is one file; and all metrics."""
