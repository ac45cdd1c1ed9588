"""How good a compressor is: every method keeps exactly as many tokens, and quality is measured after reconstruction."""
