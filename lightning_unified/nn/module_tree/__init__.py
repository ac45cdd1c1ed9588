"""What a module consists of: its repeated blocks, its submodules and tensors."""
