"""Models of allocators: the bytes a backend reserves for given live bytes."""
