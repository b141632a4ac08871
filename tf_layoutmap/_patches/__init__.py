"""Every foreign name that is replaced, in one table, installed by group.

`rows.py` says what a row is, the `*_rows.py` are the table, `engine.py` puts
rows in force and takes them back. Nothing is replaced by an import.
"""
