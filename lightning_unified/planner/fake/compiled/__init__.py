"""Compiled modules on fake tensors: graphs of torch's compiler, and their memory."""
