"""Reports on processes that have died."""

import pytest
from ray import exceptions

from cluster.driver.calls.post_mortem import death_report, translate
from cluster.protocol.process_info import ProcessInfo
from tests.support.processes import endpoints

KILLED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: GroupActor\n\tpid: 12\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
    "detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes "
    "include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force "
    "was called"
)
MEMORY = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1, ID: abc) "
    "where the task (pid=12) was running was 30.50GB / 32.00GB (0.953), which exceeds the memory usage "
    "threshold of 0.95. Ray killed this worker (ID: def) because it was the most recently scheduled task."
)


def info(log, node_id="here"):
    return ProcessInfo(1, 0, "10.0.0.1", node_id, 12, (), (), log)


def test_the_end_of_a_log_names_the_signal(tmp_path):
    log = tmp_path / "worker.err"
    early = "\n".join(f"line {i}" for i in range(3000))
    log.write_text(
        f":job_id:01\n:actor_name:group 1\n{early}\n*** SIGSEGV received at time=1 ***\n\nFatal: " + "x" * 999
    )
    first, *lines = death_report(info(str(log)), "here").splitlines()
    assert first == (
        f"It ran at node 10.0.0.1, pid 12, and was ended by SIGSEGV. The last lines of its log, {log}:"
    )
    assert lines[0] == "  line 2994" and len(lines) == 8
    assert lines[-2].startswith("  *** SIGSEGV") and len(lines[-1]) < 250


@pytest.mark.parametrize(
    ("node_id", "log", "end"),
    [
        ("there", "/logs/a.err", "; its log there is /logs/a.err"),
        ("here", "", "pid 12."),
        ("here", "/none", "is empty."),
    ],
)
def test_a_log_that_cannot_be_read_here(node_id, log, end):
    assert death_report(info(log, node_id), "here").endswith(end)


def test_rays_text_is_cut_to_what_ray_knows():
    error = exceptions.RayActorError(error_msg=KILLED)
    message = str(translate(error, endpoints([1, 1])[1]))
    assert message == (
        "group 1 died: its process has ended, and Ray knows no reason. So ends a process that crashes, or "
        "that gets SIGKILL, as of the kernel when the memory of the node has run out."
    )
    error = exceptions.RayActorError(error_msg="\tpid: 1\nIt died. Worker exit detail: It got a SIGTERM.")
    assert str(translate(error, endpoints([1])[0])) == "group 0 died: It got a SIGTERM."


def test_a_lack_of_memory_is_said():
    message = str(translate(exceptions.OutOfMemoryError(MEMORY), endpoints([1, 1])[0]))
    assert message == (
        "group 0 died: Ray has killed its process, because the memory of the node ran out "
        "(30.50GB / 32.00GB (0.953))."
    )
