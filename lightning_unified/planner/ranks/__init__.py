"""Dry runs of one rank among several: fake process groups and sharded fake copies."""
