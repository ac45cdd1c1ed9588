"""Run directories read into records: files, metrics, events and derived figures."""
