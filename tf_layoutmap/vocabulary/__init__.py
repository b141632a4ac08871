"""Open vocabularies: tables that take ids as they come."""
