"""One run: prepare the machine, build the parts, fit, and leave a record of what happened."""
