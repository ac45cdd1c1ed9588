"""What the operating system says of the machine: its RAM, the limits of control groups, and page counters."""
