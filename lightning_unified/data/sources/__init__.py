"""Sources of documents: corpora by name, and the user's files."""
