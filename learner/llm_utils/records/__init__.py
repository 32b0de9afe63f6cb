"""Files that a run writes, and readers of them."""
