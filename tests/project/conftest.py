"""Excludes the program of `test_types` from the search for doctests."""

collect_ignore = ["typed_program.py"]
