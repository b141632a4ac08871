"""What the steps of both backends have in common."""
