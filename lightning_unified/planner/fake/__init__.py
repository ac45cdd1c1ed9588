"""Fake tensors: shapes without values, the operations on them, and copies of modules that are made of them."""
