"""Excludes modules of cases, which are slow or require other packages."""

collect_ignore_glob = ["hub/*", "library/*", "programs/*"]
