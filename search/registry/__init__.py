"""The registries of methods and of trials' programs, and the check that a method can search a space."""
