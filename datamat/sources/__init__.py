"""Reads what samples are made from: the rows of an index, the files they name, and files behind URLs."""
