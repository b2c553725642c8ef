"""Arrays on groups, whole and of stacked layers."""
