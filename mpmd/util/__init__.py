"""Tools that know no step: tables, pytrees, text files, private directories, clocks, garbage collection."""
