"""What the sources give: documents, diagnostic records and the error codes in them."""
