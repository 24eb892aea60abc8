"""Pure functions from a tool's text to plain data.

A parser never raises and never hangs, whatever text it gets: what it cannot read it leaves out.
"""
