"""Files in the user's own folders: calibrations and converted models, and records of live runs."""
