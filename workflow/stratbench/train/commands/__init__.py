"""Cells that a command of the user's trains: started, watched from outside, and what it reports."""
