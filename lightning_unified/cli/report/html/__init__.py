"""The HTML page of a report: its sections, tables, charts and axes."""
