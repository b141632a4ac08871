"""Every foreign name that is replaced, in one table, installed by group.

`rows.py` defines a row, the `*_rows.py` are the table, `engine.py` installs and
uninstalls rows. Nothing is replaced by an import.
"""
