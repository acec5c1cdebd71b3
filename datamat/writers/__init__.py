"""The data sets that datamat knows by name; each module is short and meant to be copied for your own."""
