"""A cluster of processes on this machine, to try programs in."""
