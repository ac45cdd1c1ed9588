"""One run: prepare the machine, build the parts, fit, and save the results."""
