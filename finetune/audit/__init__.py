"""What is wrong with a table's rows and labels, and whether they are enough: numbers alone."""
