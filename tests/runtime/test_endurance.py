"""The process of a mesh holds after many steps, failures and programs what it held after the first."""

import pytest

from tests.support.endurance import Training, held
from tests.support.parity import mesh_of

# The task that fails would need more memory than there is.
pytestmark = pytest.mark.filterwarnings("ignore:group . .* of the operations:mpmd.PerformanceWarning")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_steps_and_programs_leave_nothing():
    with mesh_of(2) as mesh:
        Training(mesh).endure(lambda: [held()])
