"""How the tables of an exported model are stored, written and looked up."""
