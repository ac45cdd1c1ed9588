"""The compressor's networks: policy, readers and the codec that joins them."""
