"""Policies, tasks, samplers and a plain implementation for the tests of GRPO."""
