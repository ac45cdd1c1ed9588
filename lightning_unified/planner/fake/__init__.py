"""Fake tensors: a cached mode that makes them, copies of modules, and a recorder.

A fake tensor has a shape, strides, a dtype and a device, but no storage.

A dry run stacks three dispatch modes. Each operation passes them from the top to the bottom:

1. `recorder.Recorder` notes the operation, and the storages that it allocates and frees (`storages.Storages`).
2. `known_values.Answers` carries known values along with fake tensors, and answers reads such as `item()`.
3. `cached_mode.CachedFakeMode` makes the result: a fake tensor of the right shape, strides, dtype and device.

`mode.fake_world` enters the lower two and closes gaps of torch's fake mode (deep copies, formatting, NumPy). `fake_copy` copies a module
into that world. `places.Places` tells which module an operation belongs to. `flops` counts floating-point operations that torch's own
counter leaves out.
"""
