"""Memory that kernels allocate inside: temporaries and workspaces that fake tensors do not show."""
