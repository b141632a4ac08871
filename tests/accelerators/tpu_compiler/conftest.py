"""Excludes programs of other environments from the search for doctests."""

collect_ignore = ["compiling.py", "sparse_core_functions.py"]
