"""Modules that each write the file format of one target, such as Accelerate, and shared code."""
