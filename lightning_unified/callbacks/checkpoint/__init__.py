"""Checkpoints of a run: `RunCheckpoint`, and the state that a bit-exact resume needs beside Lightning's."""
