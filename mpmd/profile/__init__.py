"""The result of ``step.profile``: recorded times, the plan, and the results of the attribution."""
