"""Evaluate a classifier: metrics, calibration, plots, and the callback that saves them."""
