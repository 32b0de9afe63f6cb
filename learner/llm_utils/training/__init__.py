"""The forward passes, optimizer and metrics of an update."""
