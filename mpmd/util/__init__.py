"""Tools that know no step: tables, groupings, pytrees, files, directories, clocks, garbage collection."""
