"""The GPUs and ports of this machine, as ``mpmd doctor`` reports them. It needs neither JAX nor Ray."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

NVIDIA_SMI = "nvidia-smi"
_FIELDS = "index,name,memory.total,driver_version"
_SECONDS = 30

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
RAY_PORTS = {6379: "head node", 8265: "dashboard", 10001: "Ray Client"}


def read_gpus() -> list[dict[str, Any]]:
    """Returns the GPUs of this machine with the fields of the command's JSON; none without NVIDIA's driver.

    Raises: ``RuntimeError`` with the driver's message where it does not answer.
    """
    if shutil.which(NVIDIA_SMI) is None:
        return []
    command = [NVIDIA_SMI, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{NVIDIA_SMI} has not answered within {_SECONDS} s") from None
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip() or f"it ended with {done.returncode}")
    return [_gpu(*line.split(", ")) for line in done.stdout.splitlines() if line.strip()]


def _gpu(index: str, name: str, mebibytes: str, driver: str) -> dict[str, Any]:
    # A GPU that shares the memory of its host has none of its own to say.
    memory = int(mebibytes) * 2**20 if mebibytes.isdecimal() else 0
    return {"index": int(index), "name": name, "memory_bytes": memory, "driver": driver}


def read_ports() -> dict[str, Any]:
    """Returns the ports of this machine with the fields of the command's JSON.

    ``first`` and ``last`` are the range from which the system chooses the ports of connections; ``None``
    without /proc.

    Raises: ``OSError`` where no process can listen.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=_SECONDS).close()
    first, last = map(int, PORT_RANGE.read_text().split()) if PORT_RANGE.exists() else (None, None)
    ray = [{"port": port, "use": use, "listens": _listens(port)} for port, use in RAY_PORTS.items()]
    return {"first": first, "last": last, "ray": ray}


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):  # nobody listens there
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False
