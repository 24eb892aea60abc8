"""Names of `sgl_kernel.mamba` that SGLang imports at module level."""

from sgl_kernel import __getattr__ as __getattr__
