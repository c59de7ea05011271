"""How fast the links between workers are: the collectives and the servers of a study, timed."""
