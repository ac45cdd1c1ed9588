"""Watches over the parameters of a module while its step runs."""
