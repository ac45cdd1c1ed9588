"""The compressor's data: passages of plain text."""
