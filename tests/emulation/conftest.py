"""Excludes the programs from the process that runs other tests.

The collection of doctests would import the programs, and each program enables
the emulation.
"""

import os

collect_ignore = [] if os.environ.get("TF_LAYOUTMAP_PROGRAM") else ["programs"]
