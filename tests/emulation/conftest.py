"""Keeps the programs out of the process of other tests.

Doctest collection would import a program, which enables the emulation.
"""

import os

collect_ignore = [] if os.environ.get("TF_LAYOUTMAP_PROGRAM") else ["programs"]
