"""Tools that know no step: tables, trees of values, text files, private directories, clocks."""
