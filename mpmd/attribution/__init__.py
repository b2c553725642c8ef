"""The attribution of a measured step's idle time to its causes: plan and recorded times in, frozen data out.

Pass by pass: ``clocks`` brings the times of all processes to one clock. ``measured`` turns them into columns
by operation, message and group. ``links`` says what each operation started after, ``ideal`` when it would
run if stages were equal and messages free, ``accounts`` what the time of its end is made of; ``gaps``
divides idle time by these, and ``path`` follows the links back. ``attribution`` has all of them. All times
are whole nanoseconds, and all parts add up exactly.

``model`` simulates the step with single things changed: ``scenarios`` are such changes, ``alternatives``
other schedules and numbers of microbatches, and ``findings`` say in words what the largest would save.
"""
