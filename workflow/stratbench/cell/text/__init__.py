"""How numbers and values are said in words, and how HTML pages are filled in."""
