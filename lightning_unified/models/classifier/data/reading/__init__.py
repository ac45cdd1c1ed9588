"""Read labelled texts from a user's files: tables, JSON lines, folders."""
