"""Open vocabularies, for tables that accept arbitrary ids as keys."""
