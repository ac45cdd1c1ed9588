"""Documents, diagnostic records, and error codes in texts."""
