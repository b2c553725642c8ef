"""Random pipeline programs: what they can be, how they are drawn, and the train steps that they describe."""
