"""The attribution of a measured step's idle time to its causes: plan and recorded times in, frozen data out.

Pass by pass: ``clocks`` brings the times of all processes to one clock. ``measured`` turns the times into
columns by operation, message and group. ``links`` names the operation that each operation started after,
``ideal`` is the schedule with equal stages and free messages, ``accounts`` divides the time of each
operation's end; ``gaps`` divides idle time by the accounts, and ``path`` follows the links back. All times
are whole nanoseconds, and all parts add up exactly.

``model`` simulates the step, ``scenarios`` change single parts of the model, ``findings`` say in words how
much a change would save, and ``analysis`` computes each result when it is first asked for. ``cores`` says how
long tasks take without shared cores, and ``memory`` follows the bytes of each group.
"""
