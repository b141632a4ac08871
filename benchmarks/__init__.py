"""Benchmarks. Run `make bench`, or `python -m benchmarks --help`."""
