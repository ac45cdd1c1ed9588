"""Models of allocators: which bytes a backend reserves for the bytes that live."""
