"""Groups, threads and places that only pretend, below a runtime that recovers.

Threads of the runtime run one at a time, when the test has them go on, from one phase or wait to the next.
"""

from tests.support.membership_world.answers import STATE
from tests.support.membership_world.world import World, committed

__all__ = ["STATE", "World", "committed"]
