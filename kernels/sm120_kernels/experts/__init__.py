"""What the kernels of `ops.moe_fp4_small_batch` consist of: one module for each way to compute, and what they share."""
