"""Training of a classifier: loss, optimizer, number of epochs, and checks of their settings."""
