"""The only place that knows one device from another: memory, widths, precisions, errors."""
