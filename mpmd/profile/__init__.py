"""The result of ``step.profile``: the recorded times of steps beside the plan, and what follows from them."""
