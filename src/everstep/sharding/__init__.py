"""A tensor over ranks: layouts, boxes, who writes what, the ranks themselves."""
