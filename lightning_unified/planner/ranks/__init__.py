"""Dry runs of one rank among several: fake process groups, sharded fake copies, collectives that only leave a note."""
