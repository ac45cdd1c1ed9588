"""Memory of loading and saving weights, the page cache counted."""
