"""The only place that knows one device from another: memory, shapes, precisions, errors."""
