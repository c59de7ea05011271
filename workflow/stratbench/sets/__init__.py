"""Result sets: the records of one study from one place, in one file, checked and compared with others."""
