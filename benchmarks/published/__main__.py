"""``python -m benchmarks.published``: the suite alone, without Ray."""

from __future__ import annotations

import argparse
import pathlib

from benchmarks.measure import Target
from benchmarks.published import compared


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    parser.add_argument("--vtrain", type=pathlib.Path, help="a checkout of github.com/VIA-Research/vTrain")
    result = compared(parser.parse_args().vtrain)
    print(f"{result}\n\n{Target.table(result.targets)}")


if __name__ == "__main__":
    main()
