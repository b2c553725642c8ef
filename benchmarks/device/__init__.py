"""One command that says what works on an accelerator, and how fast: ``python -m benchmarks.device``.

It is for machines that are at hand for minutes. Each section of the table in ``sections.py`` runs in a
process of its own with a time limit (``running.py``, ``process.py``), so that one that hangs or crashes
leaves the others. A JSON file and a page of text come out (``page.py``), named by the device and the date.
``settings.py``, ``groups.py`` and ``gpt_step.py`` are what sections share.
"""
