"""What is no test here, and needs packages or seconds to be imported."""

collect_ignore_glob = ["hub/*", "library/*", "programs/*"]
