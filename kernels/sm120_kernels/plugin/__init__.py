"""The SGLang plug-in: puts this package's ops in the place of SGLang's functions."""
