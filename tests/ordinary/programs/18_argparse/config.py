"""Defaults of the experiment; the command line changes them."""

K = 10
NAMES = ["a", "b"]
options = {"scale": 1.0}
