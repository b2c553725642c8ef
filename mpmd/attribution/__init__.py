"""The attribution of a measured step's idle time to its causes: plan and recorded times in, frozen data out.

Pass by pass: ``clocks`` brings the times of all processes to one clock.
"""
