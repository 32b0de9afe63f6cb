"""Forward passes, optimizer and metrics of an update."""
