"""The plan as data, without JAX: tasks, names, specs, placements, routes, events."""
