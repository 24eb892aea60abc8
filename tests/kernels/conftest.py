"""Runs the kernels in Triton's interpreter on the CPU. The variable is read when a kernel is defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"
