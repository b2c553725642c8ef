"""Makes the schema of KubeRay's jobs, for a test of a manifest, from the definition of the resource::

    python -m tests.support.kuberay_schema VERSION ray.io_rayjobs.yaml > tests/docs/kuberay_rayjob.json

The file is ``helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml`` of https://github.com/ray-project/kuberay.
Descriptions are left out, and parts that occur several times, as the template of a pod, are there once.
"""

import collections
import json
import sys

import yaml

SOURCE = "https://github.com/ray-project/kuberay, helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml"


def short(node):
    """A schema without descriptions, in which an object has no field that is not named.

    Kubernetes drops such fields, so a misspelled one would have no effect. Where it keeps them, they stay.
    """
    if isinstance(node, list):
        return [short(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: {name: short(schema) for name, schema in value.items()} if key == "properties" else short(value)
        for key, value in node.items()
        if key != "description" and not key.startswith("x-kubernetes-")
    }
    if "properties" in kept and not node.get("x-kubernetes-preserve-unknown-fields"):
        kept.setdefault("additionalProperties", False)
    return kept


def shared(schema):
    """A schema whose objects that occur several times are definitions."""
    counts = collections.Counter(text for node in objects(schema) if len(text := json.dumps(node)) > 150)
    names = {}
    definitions = {}

    def replaced(node):
        if isinstance(node, list):
            return [replaced(item) for item in node]
        if not isinstance(node, dict):
            return node
        text = json.dumps(node)
        if counts[text] < 2:
            return {key: replaced(value) for key, value in node.items()}
        if text not in names:
            names[text] = f"object{len(names)}"
            definitions[names[text]] = {key: replaced(value) for key, value in node.items()}
        return {"$ref": f"#/$defs/{names[text]}"}

    return {**replaced(schema), "$defs": definitions}


def objects(node):
    """All objects within a schema that have named fields."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from objects(child)
    if isinstance(node, dict) and node.get("type") == "object" and "properties" in node:
        yield node


def main(version, path):
    with open(path) as file:
        resource = yaml.safe_load(file)
    (served,) = (each for each in resource["spec"]["versions"] if each["name"] == "v1")
    schema = shared(short(served["schema"]["openAPIV3Schema"]))
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    definitions = schema.pop("$defs")
    comment = f"From {SOURCE}, {version}, shortened. The KubeRay authors; licence: Apache-2.0."
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in definitions.items()]
    head = json.dumps({"$comment": comment, **schema})[:-1]
    print(head + ', "$defs": {\n' + ",\n".join(lines) + "\n}}")


if __name__ == "__main__":
    main(*sys.argv[1:])
