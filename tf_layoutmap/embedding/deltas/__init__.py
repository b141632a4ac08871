"""What changed in the tables of an embedding since a checkpoint, as files."""
