"""Plan a run: pure values and functions, without processes, clocks or files of the output."""
