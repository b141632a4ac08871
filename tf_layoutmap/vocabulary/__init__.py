"""Open vocabularies: tables that accept arbitrary ids as keys."""
