"""The `report` command: run directories as one HTML page that needs no network."""
