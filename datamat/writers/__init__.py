"""Raw data in: the writers that datamat knows by name, each a short module meant to be copied, and how to write one."""
