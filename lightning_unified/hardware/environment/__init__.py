"""Environment variables of torch's allocators: written before they are read, and checked."""
