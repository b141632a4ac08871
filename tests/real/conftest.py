"""Excludes modules without tests, which are slow or need other packages."""

collect_ignore_glob = ["hub/*", "library/*", "programs/*"]
