"""Ways for group actors to hand arrays to one another; each implements ``mpmd.runtime.transport``."""
