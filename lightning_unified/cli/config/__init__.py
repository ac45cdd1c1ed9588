"""The configuration of a run: check, compose, bind to signatures, read from an earlier run."""
