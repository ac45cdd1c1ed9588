"""The recorded public surface, one text file per subject.

It has the names that users, scripts and configurations use.
"""
