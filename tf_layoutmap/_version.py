"""Version of this package. The version is defined only in this file.

setup.py reads the version from this file without importing the package.
"""

__version__ = "0.1.0"
