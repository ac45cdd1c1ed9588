"""Files: the user's folders and run records, and weights with one copy in memory.

On a unified pool the page cache and the device's tensors share one memory. A file that is mapped, copied and left in the cache
takes twice its bytes. The modules for weights move a file piece by piece, and give each piece's pages back at once.

| module | subject |
|---|---|
| folders | the user's cache and state folders |
| status | the status file of a running fit, which `watch` reads |
| pages | give pages of a file back to the system |
| safetensors_file | read tensors of a safetensors file straight into their own memory |
| mapped | checkpoints mapped by `torch.load`, and copies out of them |
| atomic | files and folders that are whole or absent |
| sharded_folder | folders of distributed checkpoints, read by one process or by each rank |
| written | a file whose written pages leave the cache |
"""
