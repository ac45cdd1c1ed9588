"""Memory options: their memory and time, one folder for each subject."""
