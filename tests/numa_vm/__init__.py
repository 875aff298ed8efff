"""A machine with two NUMA nodes, emulated."""
