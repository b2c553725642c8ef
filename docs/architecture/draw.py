"""Draws the picture of docs/architecture.md, next to this file: ``python docs/architecture/draw.py``."""

from __future__ import annotations

import pathlib
from html import escape

SIZE = 960, 560
BLUE, GREEN, YELLOW, GREY = "#dbe7fb", "#dcf2e0", "#fdf1cf", "#eceef1"
INK, FAINT = "#1f2733", "#5a6675"


class Picture:
    """Boxes, arrows and lines of text, as the elements of an SVG."""

    def __init__(self):
        self.elements: list[str] = []

    def box(self, x, y, width, height, fill, *lines):
        """A box with its name on the first line, and its content below."""
        self.elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" '
            f'rx="6" fill="{fill}" stroke="{FAINT}"/>'
        )
        top = y + height / 2 - 7.5 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(
                x + width / 2, top + 15 * i + 4, line, is_small=i > 0
            )

    def text(self, x, y, line, is_small=False, anchor="middle"):
        size, color = (11, FAINT) if is_small else (13, INK)
        self.elements.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}">{escape(line)}</text>'
        )

    def arrow(self, *points):
        path = " ".join(f"{x},{y}" for x, y in points)
        self.elements.append(
            f'<polyline points="{path}" fill="none" stroke="{FAINT}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        width, height = SIZE
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" '
                f'viewBox="0 0 {width} {height}" '
                'font-family="sans-serif">',
                f"<title>The way of a step</title><defs>{head}</defs>",
                f'<rect width="{width}" height="{height}" fill="#fff"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def main() -> None:
    picture = Picture()
    compiled_once(picture)
    each_step(picture)
    path = pathlib.Path(__file__).parent / "way_of_a_step.svg"
    path.write_text(picture.svg())


def compiled_once(picture: Picture) -> None:
    picture.text(20, 28, "Compiled once, in the driver", anchor="start")
    picture.box(20, 45, 120, 50, YELLOW, "train_step", "language")
    passes = (
        ("trace", "TracedStep"),
        ("cut_layers", "CutStep"),
        ("split", "TaskGraph"),
        ("shard", "ShardedGraph"),
        ("place", "PlacedGraph"),
        ("lower", "Plan"),
    )
    for i, (name, value) in enumerate(passes):
        x = 170 + 112 * i
        picture.arrow((x - 30 if i == 0 else x - 14, 70), (x, 70))
        picture.box(x, 45, 98, 50, BLUE, name, value)
    picture.arrow((828, 70), (842, 70))
    picture.box(842, 45, 98, 50, BLUE, "verify", "proves the plan")
    picture.box(
        20, 150, 190, 50, GREY, "planner", "chooses what is left open"
    )
    picture.arrow((80, 150), (80, 95))
    picture.box(
        300,
        150,
        640,
        50,
        GREEN,
        "Plan: one straight-line program for each group",
        "read by memory, simulate, render, attribution and explanation",
    )
    picture.arrow((779, 95), (779, 150))


def each_step(picture: Picture) -> None:
    picture.text(
        20, 250, "Each step: one request to each group", anchor="start"
    )
    picture.box(
        20,
        268,
        200,
        60,
        YELLOW,
        "step(state, batch)",
        "step, arguments, arrays, meshes",
    )
    picture.arrow((220, 298), (280, 298))
    picture.box(
        280,
        268,
        220,
        60,
        BLUE,
        "Runtime",
        "runtime: threads of this process",
        "cluster: Ray actors",
    )
    picture.arrow((500, 298), (560, 298))
    picture.box(
        560,
        268,
        380,
        60,
        GREY,
        "recovery, if it is on",
        "keeps requests since the snapshot, and repeats them",
    )
    picture.arrow((620, 200), (620, 234), (390, 234), (390, 268))
    picture.text(632, 224, "programs", is_small=True, anchor="start")
    for i in range(3):
        x = 90 + 290 * i
        picture.box(
            x,
            400,
            200,
            70,
            GREEN,
            f"group {i}: devices of its own",
            "recv, fwd_0__1, send, bwd_0__0, ...".replace(
                "0__", f"{i}__"
            ),
            "executables, values, accumulators",
        )
        picture.arrow(
            (390, 328), (390, 364), (x + 100, 364), (x + 100, 400)
        )
        if i < 2:
            picture.arrow((x + 200, 425), (x + 290, 425))
            picture.arrow((x + 290, 447), (x + 200, 447))
            picture.text(x + 245, 418, "activations", is_small=True)
            picture.text(x + 245, 463, "gradients", is_small=True)
    picture.text(
        480,
        505,
        "Messages go from group to group: by shared memory, TCP, JAX's "
        "transfer server, or Ray's object store.",
        is_small=True,
    )
    picture.text(
        480,
        525,
        "Results stay on the groups, where the next step reads them; what "
        "the program reads comes to the driver.",
        is_small=True,
    )


if __name__ == "__main__":
    main()
