"""What is to be made: pure values and functions, without a process, a clock or a file of the output."""
