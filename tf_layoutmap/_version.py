"""Version of this package. No other file defines it.

pyproject.toml reads it without importing the package.
"""

__version__ = "0.1.0"
