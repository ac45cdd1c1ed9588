"""Made traces, and references for models of allocators and of hidden memory."""
