"""How fast the devices of a machine are, by workloads that others have published."""
