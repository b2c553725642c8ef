"""These tests import Ray, for its pickling and its types of errors, but start no cluster."""
