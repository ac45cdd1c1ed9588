"""`report`: runs that are on the disk, as one page that a browser shows without a network."""
