"""Tools that know no step: tables, groupings, pytrees, text files, directories, clocks, garbage."""
