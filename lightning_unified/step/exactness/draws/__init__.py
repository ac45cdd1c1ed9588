"""Random draws of a check, recorded over whole rows and replayed for parts of them."""
