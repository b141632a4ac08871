"""Keeps the programs out of the process of other tests.

Looking into one for doctests would import it, and that enables the emulation.
"""

import os

collect_ignore = [] if os.environ.get("TF_LAYOUTMAP_PROGRAM") else ["programs"]
