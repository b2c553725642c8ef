"""The arguments of a step: a call's leaves are described and checked, and host values made of them.

``CallSignature.bind`` in ``signature.py`` is where to start reading: a call enters, a flat ``Call`` leaves.
``specs.py`` checks the specs that belong to a call, ``leaves.py`` knows single leaves.
"""
