"""Imports PyTorch and the parts of it that every training needs, without garbage collection."""

from __future__ import annotations

import gc

# Importing torch creates a million objects. The garbage collector is disabled meanwhile, and `freeze` makes
# it ignore these objects later.
gc.disable()
try:
    from stratbench.workload.torch_internals import import_compiler

    # Without this call, creating the first optimizer would import the compiler in each process.
    import_compiler()
finally:
    gc.freeze()
    gc.enable()
