"""The language of a step: marks, ``treduce``, gradients over microbatches, callbacks, ``per_group``."""
