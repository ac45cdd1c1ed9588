"""Judge a classifier: metrics, calibration, plots, and the callback that reports them."""
