"""A run of several processes on the command line: who started them, and what they share before they are connected."""
