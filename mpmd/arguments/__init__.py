"""The arguments of a step: describes and checks a call's leaves, and converts them to host values.

``CallSignature.bind`` in ``signature.py`` is where to start reading: a call enters, a flat ``Call`` leaves.
``specs.py`` checks the specs that belong to a call, ``leaves.py`` describes single leaves.
"""
