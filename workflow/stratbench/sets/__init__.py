"""Result sets: the records of one study from one place, as one file, checked, and compared with others."""
