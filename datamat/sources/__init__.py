"""What samples are made from: the rows of an index, the files that they name, and those behind URLs."""
