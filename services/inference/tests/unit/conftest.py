"""Triton's interpreter, before anything imports vLLM and with it Triton."""

import os
from importlib import import_module
from importlib.util import find_spec

import torch

if find_spec("triton") is not None and not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    # Triton looks at the variable when it is imported and when a kernel is defined. It is gone again
    # afterwards: other tests start processes, which inherit the environment.
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import_module("triton.experimental.gluon")  # the first launch would import it, too late
        import_module("keptset_inference.capture.cut_kernel")
    finally:
        del os.environ["TRITON_INTERPRET"]
