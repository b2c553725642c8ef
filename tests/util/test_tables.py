"""Text for people: names of many leaves, tables."""

import pytest

from mpmd.util.tables import group_leaves


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"args[0]['w']": 1}, ["args[0]['w']"]),
        ({"args[0]['w']": 1, "args[0]['b']": 2}, ["args[0]['w']", "args[0]['b']"]),
        ({"args[0]['w']": 1, "args[0]['b']": 1, "args[1]": 2}, ["args[0]", "args[1]"]),
        ({"p[0].w": 1, "p[0].b": 1, "p[1].w": 1, "p[1].b": 1, "p[2].w": 2}, ["p[0..1]", "p[2].w"]),
        ({"p[0]": 1, "p[1]": 2, "p[2]": 1, "p[3]": 1}, ["p[0, 2..3]", "p[1]"]),
        ({"p['a']": 1, "p['b']": 1, "p['c']": 2}, ["p['a', 'b']", "p['c']"]),
        ({"p.a": 1, "p.b": 1, "p.c": 2}, ["p{.a, .b}", "p.c"]),
        ({"p[0]['a']": 1, "p[0]['b']": 2, "p[1]['a']": 1}, ["p[0]['a']", "p[0]['b']", "p[1]['a']"]),
        ({"p['a.b[0]']": 1, "p['c']": 2}, ["p['a.b[0]']", "p['c']"]),
    ],
)
def test_leaves_with_equal_keys_share_a_name(keys, names):
    gathered = group_leaves(keys)
    assert [name for name, _ in gathered] == names
    assert sorted(path for _, paths in gathered for path in paths) == sorted(keys)
