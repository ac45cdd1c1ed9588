"""What the compressor's benchmarks share."""
