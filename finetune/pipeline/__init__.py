"""The only places where the rooms meet: a run, and the use of what it left."""
