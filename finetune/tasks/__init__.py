"""Task types (single-label, multi-label, regression), one module each, and all metrics."""
