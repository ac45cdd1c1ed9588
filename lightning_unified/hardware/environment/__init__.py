"""The environment variables that decide how torch uses memory."""
