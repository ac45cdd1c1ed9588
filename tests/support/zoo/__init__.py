"""Networks of many kinds, for dry runs and for exactness checks."""
