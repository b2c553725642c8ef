"""What is added to the environment of a group's process."""

from cluster.environment import actor_environment

COUNT = "--xla_force_host_platform_device_count"


def test_a_group_gets_its_devices_and_threads():
    assert actor_environment({}, "", "cpu", num_devices=2, num_threads=3) == {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "3",
        "XLA_FLAGS": f"{COUNT}=2",
    }
    assert actor_environment({}, "--a", "cuda", 2, 3) == {"JAX_PLATFORMS": "cuda", "NPROC": "3"}


def test_the_flags_of_the_driver_are_kept_except_for_its_device_count():
    environment = actor_environment({}, f"--a=1 {COUNT}=8 --b", "cpu", 2, 4)
    assert environment["XLA_FLAGS"] == f"--a=1 --b {COUNT}=2"


def test_programs_for_one_thread_are_not_scheduled_for_many():
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler"
    assert actor_environment({}, "", "cpu", 1, 1)["XLA_FLAGS"] == f"{COUNT}=1 {flag}=false"
    given = {"XLA_FLAGS": f"{flag}=true"}
    assert actor_environment(given, "", "cpu", 1, 1)["XLA_FLAGS"] == f"{flag}=true {COUNT}=1"


def test_collectives_between_processes_do_not_wait_forever():
    flag = "--xla_cpu_collective_timeout_seconds"
    assert f"{flag}=60" in actor_environment({}, "", "cpu", 1, 2, num_processes=2)["XLA_FLAGS"]
    given = {"XLA_FLAGS": f"{flag}=7"}
    assert actor_environment(given, "", "cpu", 1, 2, num_processes=2)["XLA_FLAGS"] == f"{flag}=7 {COUNT}=1"


def test_variables_of_the_user_take_precedence():
    given = {"XLA_FLAGS": "--c", "NPROC": "9", "OF_MINE": "x"}
    environment = actor_environment(given, "--a", "cpu", 1, 2)
    assert environment == given | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--c {COUNT}=1"}
