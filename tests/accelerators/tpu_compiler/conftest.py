"""Excludes the program that requires JAX from the search for doctests."""

collect_ignore = ["compiling.py"]
