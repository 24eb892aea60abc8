"""Triton kernels for DeepSeek-V4-Flash decode on sm_120."""
