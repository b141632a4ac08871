"""The version of this package: the one place that says it.

pyproject.toml reads it without importing the package.
"""

__version__ = "0.1.0"
