"""Version of this package. The version is defined only in this file.

The build reads the version from this file without importing the package, as
pyproject.toml specifies.
"""

__version__ = "0.1.0"
