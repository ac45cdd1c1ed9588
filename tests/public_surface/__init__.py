"""The recorded public surface: what users, scripts and configurations name, as one text file per subject."""
