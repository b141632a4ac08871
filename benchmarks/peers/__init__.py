"""Other libraries, measured in separate processes."""
