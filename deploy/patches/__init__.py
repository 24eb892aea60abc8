"""The patch series: whether it applies, rewriting a patch, and what a new SGLang makes of it."""
