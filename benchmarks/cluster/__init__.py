"""Steps over parameter servers: how fast, and what goes over the wire."""
