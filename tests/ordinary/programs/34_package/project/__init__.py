"""The parts of the project."""
