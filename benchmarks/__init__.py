"""Measurements, never tests: `make bench`, or `python -m benchmarks --help`."""
