"""A run of several processes: who started them, and what they share before they are connected."""
