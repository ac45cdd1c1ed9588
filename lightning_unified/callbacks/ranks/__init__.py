"""What callbacks of several processes agree on, and the scheduler that starts these processes."""
