"""Use of a trained compressor: load, compress, render."""
