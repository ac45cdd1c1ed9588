"""Read and write files of weights with one copy of them in memory, the page cache counted.

On a unified pool the page cache and the device's tensors share one memory. A file that is mapped, copied and left in the cache
takes twice its bytes. These modules move a file piece by piece, and give each piece's pages back at once.

| module | subject |
|---|---|
| pages | give pages of a file back to the system |
| safetensors_file | read tensors of a safetensors file straight into their own memory |
| mapped | checkpoints mapped by `torch.load`, and copies out of them |
| written | a file whose written pages leave the cache |
"""
